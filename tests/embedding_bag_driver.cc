// Drives core.h without XLA, for the sanitizers: every operation on random bags, by 1, 2 and 8 threads.
//
// Checks that the number of threads changes no bit, that lookups and sums are near those of plain loops in double, that
// updates touch the named rows only, and that bad rows are refused before anything is written. Prints how many cases ran.

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "core.h"

namespace {

class Threads : public jaxrec::Runner {
 public:
  explicit Threads(int threads) : threads_(threads) {}
  void Run(int64_t count, const std::function<void(int64_t)>& work) override {
    std::atomic<int64_t> next{0};
    const auto loop = [&] {
      for (int64_t k; (k = next.fetch_add(1)) < count;) work(k);
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads_; ++t) others.emplace_back(loop);
    loop();
    for (auto& t : others) t.join();
  }

 private:
  int threads_;
};

#define CHECK(condition)                                                        \
  if (!(condition)) {                                                           \
    std::fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition);  \
    std::exit(1);                                                               \
  }

template <class T>
bool Same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

struct Case {
  std::mt19937 random;
  jaxrec::Bags bags;
  std::vector<int64_t> run;
  std::vector<int32_t> row;
  std::vector<float> weight, gradient, scale;
  int64_t rows, dim;

  int64_t Draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); }
  float Normal() { return std::normal_distribution<float>()(random); }

  explicit Case(unsigned seed) : random(seed) {
    rows = Draw(1, 3) == 1 ? Draw(1, 3) : Draw(1, 8) == 1 ? Draw(65000, 67000) : Draw(1, 5000);
    const int64_t dims[] = {1, 3, 8, 16, 17, 32, 64, 100, 128, 256};
    dim = rows > 5000 ? 8 : dims[Draw(0, 9)];  // Many rows are for the ranges of parts: narrow ones do.
    bags.vectors = Draw(1, 4);
    for (int64_t v = 0; v < bags.vectors; ++v) run.push_back(Draw(0, 6));
    run[0] += 1;
    for (const int64_t r : run) bags.slots += r;
    bags.batch = Draw(0, 3) == 0 ? Draw(0, 3) : Draw(1, 900);
    bags.run = run.data();
    bags.sentinel = Draw(0, 1) ? rows - 1 : rows;
    const bool one_row = Draw(0, 5) == 0;
    for (int64_t p = 0; p < bags.batch * bags.slots; ++p) {
      const int64_t r = one_row ? 0 : Draw(0, 3) == 0 ? Draw(0, std::min<int64_t>(rows, 5) - 1) : Draw(0, rows - 1);
      row.push_back(static_cast<int32_t>(Draw(0, 9) == 0 ? bags.sentinel : r));
      weight.push_back(Normal());
    }
    bags.row = row.data();
    if (Draw(0, 1)) bags.weight = weight.data();
    for (int64_t k = 0; k < bags.batch * bags.vectors * dim; ++k) gradient.push_back(Normal());
    for (int64_t r = 0; r < rows; ++r) scale.push_back(0.01f * static_cast<float>(r % 7 + 1));
  }
};

struct Arrays {
  std::vector<char> weights;
  std::vector<float> slot[2];
  jaxrec::Largest largest;

  jaxrec::Table Table(const Case& c, jaxrec::Dtype dtype) {
    jaxrec::Table table;
    table.dtype = dtype;
    table.rows = c.rows;
    table.dim = c.dim;
    table.weights = weights.data();
    table.scale = c.scale.data();
    for (int k = 0; k < 2; ++k) table.slot[k] = slot[k].data();
    return table;
  }
};

constexpr int64_t kBytes[] = {4, 2, 2, 1};

Arrays FirstArrays(Case& c, jaxrec::Dtype dtype, jaxrec::Optimizer optimizer) {
  Arrays a;
  a.weights.resize(c.rows * c.dim * kBytes[static_cast<int>(dtype)]);
  for (int64_t k = 0; k < c.rows * c.dim; ++k) {
    const float x = 0.1f * c.Normal();
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t narrow = dtype == jaxrec::Dtype::kBfloat16 ? static_cast<uint16_t>(bits >> 16) : static_cast<uint16_t>(0x2000 + k % 900);
    const int8_t small = static_cast<int8_t>(k % 255 - 127);
    if (dtype == jaxrec::Dtype::kFloat32) std::memcpy(&a.weights[k * 4], &x, 4);
    else if (dtype == jaxrec::Dtype::kInt8) std::memcpy(&a.weights[k], &small, 1);
    else std::memcpy(&a.weights[k * 2], &narrow, 2);
  }
  const bool per_row = optimizer == jaxrec::Optimizer::kRowwiseAdagrad;
  for (auto& s : a.slot) s.assign(per_row ? c.rows : c.rows * c.dim, 0.1f);
  a.largest = {{10.0f, 10.0f, 10.0f}};
  return a;
}

std::vector<char> SumsInDouble(const Case& c, std::vector<double>* sum, std::vector<double>* size) {
  sum->assign(c.rows * c.dim, 0);
  size->assign(c.rows * c.dim, 0);
  std::vector<char> touched(c.rows);
  for (int64_t b = 0, p = 0; b < c.bags.batch; ++b)
    for (int64_t v = 0; v < c.bags.vectors; ++v)
      for (int64_t l = 0; l < c.run[v]; ++l, ++p) {
        if (c.row[p] == c.bags.sentinel) continue;
        touched[c.row[p]] = 1;
        for (int64_t d = 0; d < c.dim; ++d) {
          const double term = static_cast<double>(c.gradient[(b * c.bags.vectors + v) * c.dim + d]) * (c.bags.weight ? c.weight[p] : 1.0f);
          (*sum)[c.row[p] * c.dim + d] += term;
          (*size)[c.row[p] * c.dim + d] += std::fabs(term);
        }
      }
  return touched;
}

void RunCase(unsigned seed) {
  Case c(seed);
  const auto dtype = static_cast<jaxrec::Dtype>(c.Draw(0, 2));
  const auto optimizer = static_cast<jaxrec::Optimizer>(c.Draw(0, 4));
  std::vector<double> sum, size;
  const std::vector<char> touched = SumsInDouble(c, &sum, &size);
  const Arrays before = FirstArrays(c, dtype, optimizer);
  std::vector<uint32_t> draw(c.row.size());
  for (auto& d : draw) d = static_cast<uint32_t>(c.random());
  jaxrec::Rule rule;
  rule.optimizer = optimizer;
  rule.eps = 1e-3f;
  rule.b1 = 0.9f;
  rule.b2 = 0.99f;
  rule.rate = rule.adam_rate = 0.1f;
  rule.adam_correction = 0.01f;
  rule.decay = 0.01f;
  rule.draw = draw.data();

  std::vector<float> looked_up, added, squares;
  std::vector<char> weights, faults;
  std::vector<float> slots;
  for (const int threads : {1, 2, 8}) {
    Threads runner(threads);
    Arrays a = before;
    const jaxrec::Table table = a.Table(c, dtype);
    std::vector<float> out(c.bags.batch * c.bags.vectors * c.dim, NAN), total(c.rows * c.dim, NAN), of_row(c.row.size(), NAN);
    CHECK(jaxrec::Lookup(c.bags, table, out.data(), runner).empty());
    CHECK(jaxrec::AddUp(c.bags, c.gradient.data(), c.dim, c.rows, total.data(), runner).empty());
    CHECK(jaxrec::RowSquares(c.bags, c.gradient.data(), c.dim, c.rows, of_row.data(), runner).empty());
    Arrays bytes = FirstArrays(c, jaxrec::Dtype::kInt8, optimizer);
    std::vector<float> of_bytes(out.size());
    CHECK(jaxrec::Lookup(c.bags, bytes.Table(c, jaxrec::Dtype::kInt8), of_bytes.data(), runner).empty());
    std::vector<char> bad(c.bags.vectors + 1, 7);
    const jaxrec::Largest known{{10, 10, 10}}, unknown{{INFINITY, INFINITY, INFINITY}};
    for (const auto& largest : {known, unknown}) {
      CHECK(jaxrec::Check(c.bags, table, rule, c.gradient.data(), largest, reinterpret_cast<bool*>(bad.data()),
                          reinterpret_cast<bool*>(bad.data() + c.bags.vectors), runner).empty());
      for (const char b : bad) CHECK(b == 0);
    }
    CHECK(Same(a.weights, before.weights) && Same(a.slot[0], before.slot[0]));
    CHECK(jaxrec::Update(c.bags, table, rule, c.gradient.data(), &a.largest, runner).empty());
    std::vector<float> all_slots = a.slot[0];
    all_slots.insert(all_slots.end(), a.slot[1].begin(), a.slot[1].end());
    if (threads == 1) {
      looked_up = out, added = total, squares = of_row, weights = a.weights, slots = all_slots;
    } else {
      CHECK(Same(looked_up, out) && Same(added, total) && Same(squares, of_row) && Same(weights, a.weights) && Same(slots, all_slots));
    }
  }
  const double eps = 1.2e-7 * static_cast<double>(c.row.size() + 2);
  for (size_t k = 0; k < added.size(); ++k) CHECK(std::fabs(added[k] - sum[k]) <= eps * size[k] + 1e-30);
  const int64_t bytes = c.dim * kBytes[static_cast<int>(dtype)];
  for (int64_t r = 0; r < c.rows; ++r) {
    const bool same = std::memcmp(&weights[r * bytes], &before.weights[r * bytes], bytes) == 0;
    if (!touched[r]) CHECK(same);
    if (touched[r] && dtype == jaxrec::Dtype::kFloat32 && c.dim > 1) CHECK(!same);
  }
  if (c.row.empty()) return;

  // What is out of range is refused, and nothing changes.
  Arrays a = before;
  Threads runner(2);
  const size_t at = static_cast<size_t>(c.Draw(0, static_cast<int64_t>(c.row.size()) - 1));
  for (const int64_t bad : {int64_t{-1}, c.rows + 1, int64_t{INT32_MAX}, int64_t{INT32_MIN}}) {
    const int32_t good = c.row[at];
    c.row[at] = static_cast<int32_t>(bad);
    std::vector<float> out(c.bags.batch * c.bags.vectors * c.dim), total(c.rows * c.dim), of_row(c.row.size());
    CHECK(!jaxrec::Lookup(c.bags, a.Table(c, dtype), out.data(), runner).empty());
    CHECK(!jaxrec::AddUp(c.bags, c.gradient.data(), c.dim, c.rows, total.data(), runner).empty());
    CHECK(!jaxrec::RowSquares(c.bags, c.gradient.data(), c.dim, c.rows, of_row.data(), runner).empty());
    CHECK(!jaxrec::Update(c.bags, a.Table(c, dtype), rule, c.gradient.data(), &a.largest, runner).empty());
    CHECK(Same(a.weights, before.weights) && Same(a.slot[0], before.slot[0]) && Same(a.slot[1], before.slot[1]));
    c.row[at] = good;
  }

  // A gradient that is not finite, or one whose update is not, is found.
  std::vector<char> bad(c.bags.vectors + 1);
  const auto check = [&] {
    CHECK(jaxrec::Check(c.bags, a.Table(c, dtype), rule, c.gradient.data(), a.largest, reinterpret_cast<bool*>(bad.data()),
                        reinterpret_cast<bool*>(bad.data() + c.bags.vectors), runner).empty());
  };
  const size_t element = static_cast<size_t>(c.Draw(0, static_cast<int64_t>(c.gradient.size()) - 1));
  const float good = c.gradient[element];
  for (const float value : {NAN, INFINITY, -INFINITY}) {
    c.gradient[element] = value;
    check();
    for (int64_t v = 0; v < c.bags.vectors; ++v) CHECK(bad[v] == (static_cast<int64_t>(element) / c.dim % c.bags.vectors == v));
  }
  c.gradient[element] = good;
  if (optimizer == jaxrec::Optimizer::kAdagrad && c.row[0] != c.bags.sentinel) {
    for (int64_t d = 0; d < c.dim; ++d) c.gradient[d] = 3e30f;  // The first slot is of the first vector.
    check();
    CHECK(bad[c.bags.vectors] == 1 && bad[0] == 0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 100;
  for (int k = 0; k < cases; ++k) RunCase(static_cast<unsigned>(k));
  std::printf("%d cases\n", cases);
  return 0;
}
