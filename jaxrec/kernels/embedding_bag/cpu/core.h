// Embedding bags on CPUs: pooled lookup, merged gradients and the fused update of touched rows. No XLA in here.
//
// Shape letters: B rows of the batch, S slots of a row, V pooled vectors of a row, D columns, R rows of the table, N = B * S.
// A slot names a row of the table or, with the number `sentinel`, none. The slots of a row of the batch are cut into V
// runs; a run's rows are summed, each times its weight, into one vector.
//
// All results are the same for every number of threads: work is cut by the input's shape alone, and sums have one order.

#ifndef JAXREC_KERNELS_EMBEDDING_BAG_CORE_H_
#define JAXREC_KERNELS_EMBEDDING_BAG_CORE_H_

#include <cstdint>
#include <functional>
#include <string>

namespace jaxrec {

// Runs work(0) ... work(count - 1), in any order and on any threads, and returns when all are done.
class Runner {
 public:
  virtual ~Runner() = default;
  virtual void Run(int64_t count, const std::function<void(int64_t)>& work) = 0;
};

enum class Dtype : int64_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3 };

enum class Optimizer : int64_t { kSgd = 0, kMomentum = 1, kRowwiseAdagrad = 2, kAdagrad = 3, kAdam = 4 };

constexpr int kMaxSlots = 2;  // Arrays that an optimizer keeps beside the weights.

// Where the batch's slots point.
struct Bags {
  int64_t batch = 0;                // B
  int64_t slots = 0;                // S
  int64_t vectors = 0;              // V
  const int64_t* run = nullptr;     // [V] slots of each vector; their sum is S
  const int32_t* row = nullptr;     // [B, S]
  const float* weight = nullptr;    // [B, S]; null: all are 1
  int64_t sentinel = 0;             // rows are in [0, rows); this one is none of them or holds zeros
};

struct Table {
  Dtype dtype = Dtype::kFloat32;
  int64_t rows = 0;                 // R
  int64_t dim = 0;                  // D
  void* weights = nullptr;          // [R, D]
  const float* scale = nullptr;     // [R], of int8 only
  float* slot[kMaxSlots] = {};      // [R] or [R, D]
};

// An update w -= rate * direction(g), a rule per optimizer as jaxrec.optim defines them.
struct Rule {
  Optimizer optimizer = Optimizer::kSgd;
  float eps = 0;
  float b1 = 0;
  float b2 = 0;
  float gradient_scale = 1;         // multiplies every merged gradient
  float rate = 0;                   // learning rate; Adam's first correction is in `adam_rate`
  float decay = 0;                  // rate * weight_decay
  float adam_rate = 0;              // rate / (1 - b1^t)
  float adam_correction = 1;        // 1 - b2^t
  const float* mean_square = nullptr;  // [N] at a row's first occurrence, of a row whose columns are on many devices
  const uint32_t* draw = nullptr;   // [N] state of the hash that stochastic rounding draws from; narrow tables only
  uint32_t first_column = 0;        // Of a row whose columns are on many devices.
};

// What is in range of everything a table ever held: the largest magnitude of weights [0] and slots [1...].
struct Largest {
  float value[1 + kMaxSlots] = {};
};

// All return "" or what is wrong with the input, in which case nothing was written.

// out [B, V, D]: sums of rows.
std::string Lookup(const Bags& bags, const Table& table, float* out, Runner& runner);

// out [rows, D]: the transpose, the sums of `gradient` [B, V, D] over all occurrences of a row; zeros elsewhere.
std::string AddUp(const Bags& bags, const float* gradient, int64_t dim, int64_t rows, float* out, Runner& runner);

// out [N]: at each row's first occurrence the sum of its merged gradient's squares; zeros elsewhere.
std::string RowSquares(const Bags& bags, const float* gradient, int64_t dim, int64_t rows, float* out, Runner& runner);

// bad_vector [V]: whether a vector's gradient has an element that is not finite; *bad_update: whether `Update` would write
// one. Rows are read only where `largest` does not rule that out.
std::string Check(const Bags& bags, const Table& table, const Rule& rule, const float* gradient, const Largest& largest,
                  bool* bad_vector, bool* bad_update, Runner& runner);

// Updates each named row once, in place. `largest` is brought up to date.
std::string Update(const Bags& bags, const Table& table, const Rule& rule, const float* gradient, Largest* largest,
                   Runner& runner);

}  // namespace jaxrec

#endif  // JAXREC_KERNELS_EMBEDDING_BAG_CORE_H_
