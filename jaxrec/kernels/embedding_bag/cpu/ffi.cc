// XLA's view of core.h: custom calls over its buffers, on its own threads.

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "core.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxrec {
namespace {

// Work on the threads that XLA keeps for a device's operations; the caller works too. A thread that comes when all work is
// claimed goes away again, so the caller waits only for work that somebody is doing: nested or concurrent calls that
// fill the pool cannot lock each other out.
class PoolRunner : public Runner {
 public:
  explicit PoolRunner(ffi::ThreadPool& pool) : pool_(pool) {}

  void Run(int64_t count, const std::function<void(int64_t)>& work) override {
    const int64_t helpers = std::min<int64_t>(pool_.num_threads(), count) - 1;
    if (helpers <= 0) {
      for (int64_t k = 0; k < count; ++k) work(k);
      return;
    }
    auto shared = std::make_shared<Shared>();
    shared->count = count;
    shared->work = &work;
    for (int64_t h = 0; h < helpers; ++h) pool_.Schedule([shared] { shared->Work(); });
    shared->Work();
    std::unique_lock<std::mutex> lock(shared->mutex);
    shared->all_done.wait(lock, [&] { return shared->done.load() == count; });
  }

 private:
  struct Shared {
    int64_t count = 0;
    const std::function<void(int64_t)>* work = nullptr;  // Alive until all work is done.
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::mutex mutex;
    std::condition_variable all_done;

    void Work() {
      int64_t mine = 0;
      for (int64_t k; (k = next.fetch_add(1)) < count; ++mine) (*work)(k);
      if (mine == 0 || done.fetch_add(mine) + mine < count) return;
      const std::lock_guard<std::mutex> lock(mutex);
      all_done.notify_one();
    }
  };

  ffi::ThreadPool& pool_;
};

ffi::Error Wrong(const std::string& message) {
  return message.empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument("embedding bag: " + message);
}

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using Ints = ffi::Span<const int64_t>;

// Where an operand may be absent it has no elements.
template <class Buffer>
auto DataOrNull(Buffer& buffer) -> decltype(buffer.typed_data()) {
  return buffer.element_count() ? buffer.typed_data() : nullptr;
}

std::string ReadBags(S32 row, F32 weight, Ints run, int64_t sentinel, Bags* bags) {
  if (row.dimensions().size() != 2) return "rows must be [B, S]";
  bags->batch = row.dimensions()[0];
  bags->slots = row.dimensions()[1];
  bags->vectors = static_cast<int64_t>(run.size());
  bags->run = run.begin();
  bags->row = row.typed_data();
  bags->weight = DataOrNull(weight);
  bags->sentinel = sentinel;
  int64_t slots = 0;
  for (const int64_t r : run) slots += r;
  if (slots != bags->slots) return "the runs have " + std::to_string(slots) + " slots, the rows " + std::to_string(bags->slots);
  if (bags->weight && static_cast<int64_t>(weight.element_count()) != bags->batch * bags->slots) return "weights must be [B, S]";
  return "";
}

std::string ReadTable(ffi::AnyBuffer weights, int64_t dtype, Table* table) {
  if (weights.dimensions().size() != 2) return "a table must be [R, D]";
  const bool fits = (weights.element_type() == ffi::F32 && dtype == 0) ||
                    (weights.element_type() == ffi::U16 && (dtype == 1 || dtype == 2)) ||
                    (weights.element_type() == ffi::S8 && dtype == 3);
  if (!fits) return "a table is float32, the uint16 bits of bfloat16 or float16, or int8";
  table->dtype = static_cast<Dtype>(dtype);
  table->rows = weights.dimensions()[0];
  table->dim = weights.dimensions()[1];
  table->weights = weights.untyped_data();
  return "";
}

std::string CheckGradient(const Bags& bags, F32 gradient, int64_t dim) {
  return static_cast<int64_t>(gradient.element_count()) == bags.batch * bags.vectors * dim ? "" : "gradients must be [B, V * D]";
}

struct RuleAttributes {
  int64_t optimizer;
  float eps, b1, b2;
};

// scalars: float32 [gradient scale, rate, decay, Adam's rate, Adam's correction, whether to write, first column].
constexpr int64_t kScalars = 7;

std::string ReadRule(const RuleAttributes& attributes, F32 scalars, F32 mean_square, ffi::Buffer<ffi::U32> draw, const Bags& bags,
                     Rule* rule) {
  const int64_t n = bags.batch * bags.slots;
  if (attributes.optimizer < 0 || attributes.optimizer > 4) return "unknown optimizer";
  if (static_cast<int64_t>(scalars.element_count()) != kScalars) return "unexpected number of scalars";
  if (mean_square.element_count() && static_cast<int64_t>(mean_square.element_count()) != n) return "mean squares must be [B * S]";
  if (draw.element_count() && static_cast<int64_t>(draw.element_count()) != n) return "draws must be [B * S]";
  const float* s = scalars.typed_data();
  *rule = {static_cast<Optimizer>(attributes.optimizer), attributes.eps, attributes.b1, attributes.b2, s[0], s[1], s[2], s[3], s[4],
           DataOrNull(mean_square), DataOrNull(draw), static_cast<uint32_t>(s[6])};
  return "";
}

constexpr int64_t kSlots[] = {0, 1, 1, 1, 2};  // Arrays of each Optimizer.

F32& BufferOf(F32& operand) { return operand; }
F32& BufferOf(ffi::Result<F32>& result) { return *result; }

template <class Arguments>
std::string ReadSlots(Arguments& arguments, Optimizer optimizer, Table* table) {
  const int64_t count = kSlots[static_cast<int64_t>(optimizer)];
  if (static_cast<int64_t>(arguments.size()) != count) return "unexpected number of the optimizer's arrays";
  const int64_t size = table->rows * (optimizer == Optimizer::kRowwiseAdagrad ? 1 : table->dim);
  for (int64_t k = 0; k < count; ++k) {
    auto array = arguments.template get<F32>(k);
    if (!array.has_value()) return "the optimizer's arrays are float32";
    F32& values = BufferOf(*array);
    table->slot[k] = values.typed_data();
    if (static_cast<int64_t>(values.element_count()) != size) return "an optimizer's array has another shape than its table";
  }
  return "";
}

std::string ReadLargest(F32 largest, Optimizer optimizer, Largest* out) {
  const int64_t count = 1 + kSlots[static_cast<int64_t>(optimizer)];
  if (static_cast<int64_t>(largest.element_count()) != count) return "largest must be [1 + the optimizer's arrays]";
  for (int64_t k = 0; k < count; ++k) out->value[k] = largest.typed_data()[k];
  return "";
}

#define RETURN_IF_WRONG(expression)                               \
  if (const std::string wrong = (expression); !wrong.empty()) {   \
    return Wrong(wrong);                                         \
  }

ffi::Error LookupCall(ffi::ThreadPool pool, ffi::AnyBuffer weights, F32 scale, S32 row, F32 weight, ffi::ResultBuffer<ffi::F32> out,
                      Ints run, int64_t sentinel, int64_t dtype) {
  Bags bags;
  Table table;
  RETURN_IF_WRONG(ReadBags(row, weight, run, sentinel, &bags));
  RETURN_IF_WRONG(ReadTable(weights, dtype, &table));
  table.scale = DataOrNull(scale);
  if (table.dtype == Dtype::kInt8 && static_cast<int64_t>(scale.element_count()) != table.rows) return Wrong("int8 rows need a scale each");
  if (static_cast<int64_t>(out->element_count()) != bags.batch * bags.vectors * table.dim) return Wrong("the result must be [B, V * D]");
  PoolRunner runner(pool);
  return Wrong(Lookup(bags, table, out->typed_data(), runner));
}

ffi::Error AddUpCall(ffi::ThreadPool pool, S32 row, F32 weight, F32 gradient, ffi::ResultBuffer<ffi::F32> out, Ints run, int64_t sentinel) {
  Bags bags;
  RETURN_IF_WRONG(ReadBags(row, weight, run, sentinel, &bags));
  const int64_t rows = out->dimensions()[0], dim = out->dimensions()[1];
  RETURN_IF_WRONG(CheckGradient(bags, gradient, dim));
  PoolRunner runner(pool);
  return Wrong(AddUp(bags, gradient.typed_data(), dim, rows, out->typed_data(), runner));
}

ffi::Error RowSquaresCall(ffi::ThreadPool pool, S32 row, F32 weight, F32 gradient, ffi::ResultBuffer<ffi::F32> out, Ints run, int64_t sentinel, int64_t rows, int64_t dim) {
  Bags bags;
  RETURN_IF_WRONG(ReadBags(row, weight, run, sentinel, &bags));
  RETURN_IF_WRONG(CheckGradient(bags, gradient, dim));
  if (static_cast<int64_t>(out->element_count()) != bags.batch * bags.slots) return Wrong("the result must be [B * S]");
  PoolRunner runner(pool);
  return Wrong(RowSquares(bags, gradient.typed_data(), dim, rows, out->typed_data(), runner));
}

ffi::Error CheckCall(ffi::ThreadPool pool, S32 row, F32 weight, F32 gradient, F32 scalars, F32 mean_square, ffi::Buffer<ffi::U32> draw,
                     F32 largest, ffi::AnyBuffer weights, ffi::RemainingArgs slots, ffi::ResultBuffer<ffi::PRED> bad_vector,
                     ffi::ResultBuffer<ffi::PRED> bad_update, Ints run, int64_t sentinel, int64_t dtype,
                     int64_t optimizer, float eps, float b1, float b2) {
  Bags bags;
  Table table;
  Rule rule;
  RETURN_IF_WRONG(ReadBags(row, weight, run, sentinel, &bags));
  RETURN_IF_WRONG(ReadTable(weights, dtype, &table));
  RETURN_IF_WRONG(CheckGradient(bags, gradient, table.dim));
  RETURN_IF_WRONG(ReadRule({optimizer, eps, b1, b2}, scalars, mean_square, draw, bags, &rule));
  RETURN_IF_WRONG(ReadSlots(slots, rule.optimizer, &table));
  if (static_cast<int64_t>(bad_vector->element_count()) != bags.vectors) return Wrong("the result must be [V]");
  Largest most;
  RETURN_IF_WRONG(ReadLargest(largest, rule.optimizer, &most));
  PoolRunner runner(pool);
  return Wrong(Check(bags, table, rule, gradient.typed_data(), most, bad_vector->typed_data(), bad_update->typed_data(),
                     runner));
}

ffi::Error UpdateCall(ffi::ThreadPool pool, S32 row, F32 weight, F32 gradient, F32 scalars, F32 mean_square, ffi::Buffer<ffi::U32> draw,
                      F32 largest, ffi::AnyBuffer weights, ffi::RemainingArgs, ffi::ResultBuffer<ffi::F32> new_largest,
                      ffi::Result<ffi::AnyBuffer> new_weights, ffi::RemainingRets new_slots, Ints run, int64_t sentinel, int64_t dtype,
                      int64_t optimizer, float eps, float b1, float b2) {
  Bags bags;
  Table table;
  Rule rule;
  RETURN_IF_WRONG(ReadBags(row, weight, run, sentinel, &bags));
  // The results are the operands' memory: XLA aliases them, and copies first where somebody still needs the old values.
  RETURN_IF_WRONG(ReadTable(*new_weights, dtype, &table));
  RETURN_IF_WRONG(CheckGradient(bags, gradient, table.dim));
  RETURN_IF_WRONG(ReadRule({optimizer, eps, b1, b2}, scalars, mean_square, draw, bags, &rule));
  RETURN_IF_WRONG(ReadSlots(new_slots, rule.optimizer, &table));
  if (new_weights->untyped_data() != weights.untyped_data()) return Wrong("the table is not updated in place");
  Largest most;
  RETURN_IF_WRONG(ReadLargest(largest, rule.optimizer, &most));
  std::string wrong;
  if (scalars.typed_data()[5] != 0.0f) {
    PoolRunner runner(pool);
    wrong = Update(bags, table, rule, gradient.typed_data(), &most, runner);
  }
  for (int64_t k = 0; k < static_cast<int64_t>(new_largest->element_count()); ++k) new_largest->typed_data()[k] = most.value[k];
  return Wrong(wrong);
}

}  // namespace
}  // namespace jaxrec

#define ATTRIBUTES_OF_BAGS .Attr<jaxrec::Ints>("run").Attr<int64_t>("sentinel")
// Rows, weights, gradient.
#define OPERANDS_OF_GRADIENTS .Ctx<ffi::ThreadPool>().Arg<jaxrec::S32>().Arg<jaxrec::F32>().Arg<jaxrec::F32>()
#define OPERANDS_OF_UPDATE                                                                        \
  OPERANDS_OF_GRADIENTS.Arg<jaxrec::F32>().Arg<jaxrec::F32>().Arg<ffi::Buffer<ffi::U32>>()        \
      .Arg<jaxrec::F32>().Arg<ffi::AnyBuffer>().RemainingArgs()
#define ATTRIBUTES_OF_UPDATE                                                                      \
  ATTRIBUTES_OF_BAGS.Attr<int64_t>("dtype").Attr<int64_t>("optimizer").Attr<float>("eps").Attr<float>("b1").Attr<float>("b2")
#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED XLA_FFI_Error* JaxrecEmbeddingLookup(XLA_FFI_CallFrame* frame);
EXPORTED XLA_FFI_Error* JaxrecEmbeddingAddUp(XLA_FFI_CallFrame* frame);
EXPORTED XLA_FFI_Error* JaxrecEmbeddingRowSquares(XLA_FFI_CallFrame* frame);
EXPORTED XLA_FFI_Error* JaxrecEmbeddingCheck(XLA_FFI_CallFrame* frame);
EXPORTED XLA_FFI_Error* JaxrecEmbeddingUpdate(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxrecEmbeddingLookup, jaxrec::LookupCall,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jaxrec::F32>()
                                  .Arg<jaxrec::S32>()
                                  .Arg<jaxrec::F32>()
                                  .Ret<jaxrec::F32>() ATTRIBUTES_OF_BAGS.Attr<int64_t>("dtype"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxrecEmbeddingAddUp, jaxrec::AddUpCall,
                              ffi::Ffi::Bind() OPERANDS_OF_GRADIENTS.Ret<jaxrec::F32>() ATTRIBUTES_OF_BAGS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxrecEmbeddingRowSquares, jaxrec::RowSquaresCall,
                              ffi::Ffi::Bind() OPERANDS_OF_GRADIENTS.Ret<jaxrec::F32>()
                                  ATTRIBUTES_OF_BAGS.Attr<int64_t>("rows").Attr<int64_t>("dim"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxrecEmbeddingCheck, jaxrec::CheckCall,
                              ffi::Ffi::Bind() OPERANDS_OF_UPDATE.Ret<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::PRED>>() ATTRIBUTES_OF_UPDATE);
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxrecEmbeddingUpdate, jaxrec::UpdateCall,
                              ffi::Ffi::Bind() OPERANDS_OF_UPDATE.Ret<jaxrec::F32>().Ret<ffi::AnyBuffer>().RemainingRets()
                                  ATTRIBUTES_OF_UPDATE);
