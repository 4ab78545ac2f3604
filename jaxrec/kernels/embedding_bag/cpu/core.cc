// The work of core.h. Plain loops over columns, which the compiler turns into vector instructions.

#include "core.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <numeric>
#include <vector>

#include "numbers.h"
#include "work.h"

namespace jaxrec {
namespace {

// How far ahead rows are fetched: enough to hide a miss, little enough to stay in the first cache. Measured by embedding_update.
constexpr int64_t kLookupAhead = 16;
constexpr int64_t kUpdateAhead = 16;
// Rows that one piece of a lookup reads.
constexpr int64_t kLookupPiece = 2048;
// Positions that one piece of work counts and deals out; how finely rows are counted; about how many occurrences a part
// holds (their gradients fit the second cache), and how many rows at most.
constexpr int64_t kChunk = 16384;
constexpr int64_t kBuckets = 4096;
constexpr int64_t kPart = 2048;
constexpr int64_t kRange = 65536;
constexpr int64_t kLine = 64;

template <bool kWrite>
inline void Fetch(const void* begin, int64_t bytes) {
  const char* p = static_cast<const char*>(begin);
  for (int64_t k = 0; k < bytes; k += kLine) {
    __builtin_prefetch(p + k, kWrite ? 1 : 0, 3);
    asm volatile("");  // GCC removes a loop that does nothing but prefetch.
  }
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::string OutOfRange(int64_t row, int64_t rows) {
  return "row " + std::to_string(row) + " is out of range: the table has " + std::to_string(rows) + " rows";
}

// The first thing that went wrong on any thread.
class Fault {
 public:
  void Set(int64_t row) {
    int64_t none = kNone;
    row_.compare_exchange_strong(none, row);
  }
  bool is_set() const { return row_.load() != kNone; }
  std::string Message(int64_t rows) const { return is_set() ? OutOfRange(row_.load(), rows) : ""; }

 private:
  static constexpr int64_t kNone = INT64_MIN;
  std::atomic<int64_t> row_{kNone};
};

// ---------------------------------------------------------------- Lookup

struct RowsOfInt8 {
  const int8_t* weights;
  const float* scale;
  static constexpr int64_t kBytes = 1;
  const void* Address(int64_t row, int64_t dim) const { return weights + row * dim; }
  void FetchScale(int64_t row) const { __builtin_prefetch(scale + row); }
  float Scale(int64_t row) const { return scale[row]; }
  float Load(int64_t at) const { return static_cast<float>(weights[at]); }
};

template <class Number>
struct RowsOf {
  const typename Number::Stored* weights;
  static constexpr int64_t kBytes = sizeof(typename Number::Stored);
  const void* Address(int64_t row, int64_t dim) const { return weights + row * dim; }
  void FetchScale(int64_t) const {}
  float Scale(int64_t) const { return 1.0f; }
  float Load(int64_t at) const { return Number::Load(weights + at); }
};

// Sums the rows of a run of slots into out [D], columns [first, first + 16 W).
template <int W, class Rows>
inline void PoolColumns(const Rows& rows, int64_t dim, int64_t first, const int32_t* row, const float* weight, int64_t run,
                        int64_t sentinel, float* out) {
  Floats sum[W] = {};
  for (int64_t l = 0; l < run; ++l) {
    if (row[l] == sentinel) continue;
    const int64_t at = row[l] * dim + first;
    const float w = rows.Scale(row[l]) * (weight ? weight[l] : 1.0f);
    Floats value[W];
    for (int k = 0; k < W; ++k)
      for (int j = 0; j < kLanes; ++j) value[k][j] = rows.Load(at + k * kLanes + j);
    if (w == 1.0f) {
      for (int k = 0; k < W; ++k) sum[k] += value[k];
    } else {
      for (int k = 0; k < W; ++k) sum[k] += value[k] * w;
    }
  }
  std::memcpy(out + first, sum, sizeof(sum));
}

template <class Rows>
inline void Pool(const Rows& rows, int64_t dim, const int32_t* row, const float* weight, int64_t run, int64_t sentinel,
                 float* out) {
  int64_t first = 0;
  for (; first + 128 <= dim; first += 128) PoolColumns<8>(rows, dim, first, row, weight, run, sentinel, out);
  if (first + 64 <= dim) PoolColumns<4>(rows, dim, first, row, weight, run, sentinel, out), first += 64;
  if (first + 32 <= dim) PoolColumns<2>(rows, dim, first, row, weight, run, sentinel, out), first += 32;
  if (first + 16 <= dim) PoolColumns<1>(rows, dim, first, row, weight, run, sentinel, out), first += 16;
  if (first == dim) return;
  for (int64_t d = first; d < dim; ++d) out[d] = 0.0f;
  for (int64_t l = 0; l < run; ++l) {
    if (row[l] == sentinel) continue;
    const float w = rows.Scale(row[l]) * (weight ? weight[l] : 1.0f);
    for (int64_t d = first; d < dim; ++d) out[d] += rows.Load(row[l] * dim + d) * w;
  }
}

// Vector by vector: a vector's rows are in one table, whose pages are then at hand.
template <class Rows>
std::string LookupRows(const Bags& bags, const Table& table, const Rows& rows, float* out, Runner& runner) {
  const int64_t dim = table.dim, row_bytes = dim * Rows::kBytes;
  struct Piece {
    int64_t vector, first_slot, begin, end;
  };
  std::vector<Piece> pieces;
  for (int64_t v = 0, s = 0; v < bags.vectors; s += bags.run[v++]) {
    const int64_t rows_of_batch = std::max<int64_t>(1, kLookupPiece / std::max<int64_t>(1, bags.run[v]));
    for (int64_t b = 0; b < bags.batch; b += rows_of_batch) pieces.push_back({v, s, b, std::min(bags.batch, b + rows_of_batch)});
  }
  Fault fault;
  runner.Run(static_cast<int64_t>(pieces.size()), [&](int64_t k) {
    const FlushSubnormals flush;
    const auto [v, first_slot, begin, end] = pieces[k];
    const int64_t run = bags.run[v];
    for (int64_t b = begin; b < end; ++b)
      for (int64_t l = 0; l < run; ++l) {
        const int64_t row = bags.row[b * bags.slots + first_slot + l];
        if (row != bags.sentinel && static_cast<uint64_t>(row) >= static_cast<uint64_t>(table.rows)) return fault.Set(row);
      }
    // Rows are fetched some bags ahead, up to the end of the piece.
    const int64_t ahead = CeilDiv(kLookupAhead, std::max<int64_t>(1, run));
    const auto fetch = [&](int64_t b) {
      const int32_t* const row = bags.row + b * bags.slots + first_slot;
      for (int64_t l = 0; l < run; ++l) {
        if (row[l] == bags.sentinel) continue;
        Fetch<false>(rows.Address(row[l], dim), row_bytes);
        rows.FetchScale(row[l]);
      }
    };
    for (int64_t b = begin; b < std::min(end, begin + ahead); ++b) fetch(b);
    for (int64_t b = begin; b < end; ++b) {
      if (b + ahead < end) fetch(b + ahead);
      const int64_t p = b * bags.slots + first_slot;
      Pool(rows, dim, bags.row + p, bags.weight ? bags.weight + p : nullptr, run, bags.sentinel, out + (b * bags.vectors + v) * dim);
    }
  });
  return fault.Message(table.rows);
}

// ---------------------------------------------------------------- Parts: the occurrences of each row, brought together

struct Occurrence {
  int32_t row;
  int32_t vector;    // b * V + v
  int32_t position;  // b * S + s
};

// All occurrences, dealt out to parts. A part has the rows of a range, and its occurrences are in the order of their
// positions. Ranges are visited one after the other, rows in ascending order: neighbours share pages and cache lines.
struct Parts {
  struct Part {
    int64_t first_row, rows;     // The range.
    int64_t begin, end;          // Its occurrences.
  };
  Buffer<Occurrence> occurrence;
  std::vector<Part> part;
};

class Dealer {
 public:
  Dealer(const Bags& bags, int64_t rows) : bags_(bags), rows_(rows) {
    while ((rows >> shift_) >= kBuckets) ++shift_;
    buckets_ = ((std::max<int64_t>(rows, 1) - 1) >> shift_) + 1;
    for (int64_t v = 0; v < bags.vectors; ++v)
      for (int64_t l = 0; l < bags.run[v]; ++l) vector_.push_back(static_cast<int32_t>(v));
  }

  std::string Deal(Runner& runner, Parts* out) const {
    const int64_t per_chunk = std::max<int64_t>(1, kChunk / std::max<int64_t>(1, bags_.slots));
    const int64_t chunks = CeilDiv(bags_.batch, per_chunk);
    Buffer<int32_t> counts;
    int32_t* const count = counts.Resize(chunks * buckets_);
    Fault fault;
    runner.Run(chunks, [&](int64_t c) {
      int32_t* const of_chunk = count + c * buckets_;
      std::fill(of_chunk, of_chunk + buckets_, 0);
      Each(c * per_chunk, std::min(bags_.batch, (c + 1) * per_chunk), [&](int32_t row, int64_t, int64_t, int64_t) {
        if (static_cast<uint64_t>(static_cast<int64_t>(row)) >= static_cast<uint64_t>(rows_)) return fault.Set(row);
        ++of_chunk[row >> shift_];
      });
    });
    if (fault.is_set()) return fault.Message(rows_);

    // Neighbouring buckets become a part, until it has enough occurrences or rows.
    std::vector<int32_t> part_of(buckets_);
    std::vector<int64_t> all(buckets_);
    for (int64_t c = 0; c < chunks; ++c)
      for (int64_t k = 0; k < buckets_; ++k) all[k] += count[c * buckets_ + k];
    int64_t total = 0;
    for (int64_t k = 0, first = 0; k < buckets_; ++k) {
      const int64_t begin = out->part.empty() ? 0 : out->part.back().end;
      part_of[k] = static_cast<int32_t>(out->part.size());
      total += all[k];
      if (total - begin >= kPart || k + 1 - first >= std::max<int64_t>(1, kRange >> shift_) || k + 1 == buckets_) {
        if (total > begin) out->part.push_back({first << shift_, std::min(rows_, (k + 1) << shift_) - (first << shift_), begin, total});
        first = k + 1;
      }
    }
    const int64_t parts = static_cast<int64_t>(out->part.size());
    std::vector<int64_t> next(chunks * parts), filled(parts);
    for (int64_t k = 0; k < parts; ++k) filled[k] = out->part[k].begin;
    for (int64_t c = 0; c < chunks; ++c) {
      for (int64_t k = 0; k < parts; ++k) next[c * parts + k] = filled[k];
      for (int64_t k = 0; k < buckets_; ++k)
        if (const int32_t n = count[c * buckets_ + k]) filled[part_of[k]] += n;
    }
    Occurrence* const occurrence = out->occurrence.Resize(total);
    runner.Run(chunks, [&](int64_t c) {
      int64_t* const at = next.data() + c * parts;
      Each(c * per_chunk, std::min(bags_.batch, (c + 1) * per_chunk), [&](int32_t row, int64_t b, int64_t p, int64_t s) {
        occurrence[at[part_of[row >> shift_]]++] = {row, static_cast<int32_t>(b * bags_.vectors + vector_[s]), static_cast<int32_t>(p)};
      });
    });
    return "";
  }

 private:
  template <class F>
  void Each(int64_t begin, int64_t end, const F& f) const {
    int64_t p = begin * bags_.slots;
    for (int64_t b = begin; b < end; ++b)
      for (int64_t s = 0; s < bags_.slots; ++s, ++p)
        if (bags_.row[p] != bags_.sentinel) f(bags_.row[p], b, p, s);
  }

  const Bags& bags_;
  const int64_t rows_;
  int shift_ = 0;                // A bucket has 2^shift rows.
  int64_t buckets_ = 0;
  std::vector<int32_t> vector_;  // [S]
};

// The distinct rows of a part, ascending, each with the list of its occurrences in order. Kept by a thread from part to part.
class Merge {
 public:
  void Read(const Parts::Part& part, const Occurrence* all) {
    const int64_t n = part.end - part.begin;
    occurrence_ = all + part.begin;
    if (static_cast<int64_t>(last_.size()) < part.rows) last_.resize(part.rows), head_.resize(part.rows);
    named_.assign(CeilDiv(part.rows, 64), 0);
    next_.resize(n);
    first_.clear();
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = occurrence_[i].row - part.first_row;
      const uint64_t bit = uint64_t{1} << (row % 64);
      next_[i] = kNone;
      if (named_[row / 64] & bit) {
        next_[last_[row]] = static_cast<int32_t>(i);
      } else {
        named_[row / 64] |= bit;
        head_[row] = static_cast<int32_t>(i);
      }
      last_[row] = static_cast<int32_t>(i);
    }
    for (size_t w = 0; w < named_.size(); ++w)
      for (uint64_t bits = named_[w]; bits; bits &= bits - 1) first_.push_back(head_[w * 64 + __builtin_ctzll(bits)]);
  }

  int64_t size() const { return static_cast<int64_t>(first_.size()); }
  const Occurrence& First(int64_t u) const { return occurrence_[first_[u]]; }

  // The sum of a row's gradients, each times its weight, in the order of positions. Returns [D], in place where there is but one.
  const float* Sum(int64_t u, const Bags& bags, const float* gradient, int64_t dim) {
    const int32_t i = first_[u];
    if (next_[i] == kNone && !bags.weight) return gradient + occurrence_[i].vector * dim;
    if (static_cast<int64_t>(sum_.size()) < dim) sum_.resize(dim);
    int64_t first = 0;
    for (; first + 128 <= dim; first += 128) SumColumns<8>(i, bags.weight, gradient, dim, first);
    for (; first + 32 <= dim; first += 32) SumColumns<2>(i, bags.weight, gradient, dim, first);
    for (; first + 16 <= dim; first += 16) SumColumns<1>(i, bags.weight, gradient, dim, first);
    for (int64_t d = first; d < dim; ++d) {
      float total = 0.0f;
      for (int32_t k = i; k != kNone; k = next_[k]) {
        const float w = bags.weight ? bags.weight[occurrence_[k].position] : 1.0f;
        total += gradient[occurrence_[k].vector * dim + d] * w;
      }
      sum_[d] = total;
    }
    return sum_.data();
  }

 private:
  static constexpr int32_t kNone = -1;

  template <int W>
  void SumColumns(int32_t i, const float* weight, const float* gradient, int64_t dim, int64_t first) {
    Floats sum[W] = {};
    for (int32_t k = i; k != kNone; k = next_[k]) {
      Floats value[W];
      std::memcpy(value, gradient + occurrence_[k].vector * dim + first, sizeof(value));
      const float w = weight ? weight[occurrence_[k].position] : 1.0f;
      for (int j = 0; j < W; ++j) sum[j] += value[j] * w;
    }
    std::memcpy(sum_.data() + first, sum, sizeof(sum));
  }

  const Occurrence* occurrence_ = nullptr;
  std::vector<uint64_t> named_;        // A bit for each row of the range.
  std::vector<int32_t> head_, last_;   // Of each named row of the range: its first and last occurrence.
  std::vector<int32_t> first_;         // Of each distinct row: its first occurrence.
  std::vector<int32_t> next_;          // Of each occurrence.
  std::vector<float> sum_;
};

// Calls visitor.Row(part, first occurrence, merged gradient) for every distinct row, and before that visitor.Fetch.
template <class Visitor>
std::string VisitRows(const Bags& bags, const float* gradient, int64_t dim, int64_t rows, Visitor& visitor, Runner& runner) {
  if (bags.batch * std::max(bags.slots, bags.vectors) >= INT32_MAX) return "a batch names more than 2^31 - 1 rows";
  Parts parts;
  const Dealer dealer(bags, rows);
  std::string wrong = dealer.Deal(runner, &parts);
  if (!wrong.empty()) return wrong;
  const int64_t count = static_cast<int64_t>(parts.part.size());
  visitor.Start(count);
  // The largest first, lest one be begun when all others are done.
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  const auto size = [&](int64_t k) { return parts.part[k].end - parts.part[k].begin; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return size(a) > size(b); });
  runner.Run(count, [&](int64_t turn) {
    const int64_t part = order[turn];
    const FlushSubnormals flush;
    static thread_local Merge merge;
    merge.Read(parts.part[part], parts.occurrence.data());
    const int64_t distinct = merge.size();
    const auto fetch = [&](int64_t u) {
      visitor.Fetch(merge.First(u));
      Fetch<false>(gradient + merge.First(u).vector * dim, dim * 4);
    };
    for (int64_t u = 0; u < std::min(kUpdateAhead, distinct); ++u) fetch(u);
    for (int64_t u = 0; u < distinct; ++u) {
      if (u + kUpdateAhead < distinct) fetch(u + kUpdateAhead);
      visitor.Row(part, merge.First(u), merge.Sum(u, bags, gradient, dim));
    }
  });
  return "";
}

struct WriteSum {
  int64_t dim;
  float* out;
  void Start(int64_t) {}
  void Fetch(const Occurrence&) const {}
  void Row(int64_t, const Occurrence& first, const float* sum) const { std::memcpy(out + first.row * dim, sum, dim * 4); }
};

// By lanes, then halves: the order is the same for every instruction set.
inline float SumOfSquares(const float* g, int64_t dim, float scale) {
  Floats lanes = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    Floats value;
    std::memcpy(&value, g + d, sizeof(value));
    value *= scale;
    lanes += value * value;
  }
  for (int64_t j = 0; d < dim; ++d, ++j) lanes[j] += (g[d] * scale) * (g[d] * scale);
  return SumOfLanes(lanes);
}

struct WriteSquares {
  int64_t dim;
  float* out;
  void Start(int64_t) {}
  void Fetch(const Occurrence&) const {}
  void Row(int64_t, const Occurrence& first, const float* sum) const { out[first.position] = SumOfSquares(sum, dim, 1.0f); }
};

// ---------------------------------------------------------------- Update

// The largest magnitudes that an update wrote, or would write, lane by lane: [0] of what is checked beside the slots, [1] of
// weights, [2...] of slots. One for each part: threads write them.
constexpr int kMagnitudes = 2 + kMaxSlots;
struct Magnitudes {
  uint32_t value[kMagnitudes][kLanes] = {};

  uint32_t Most(int k) const { return *std::max_element(value[k], value[k] + kLanes); }
  void Add(const Magnitudes& other) {
    for (int k = 0; k < kMagnitudes; ++k)
      for (int j = 0; j < kLanes; ++j) value[k][j] = Larger(value[k][j], other.value[k][j]);
  }
};

template <class Number, Optimizer kOptimizer, bool kWrite>
class UpdateRows {
 public:
  UpdateRows(const Table& table, const Rule& rule) : table_(table), rule_(rule) {}

  void Start(int64_t parts) { magnitudes_.resize(parts); }

  void Fetch(const Occurrence& first) const {
    const int64_t row = first.row, dim = table_.dim;
    jaxrec::Fetch<kWrite>(Weights() + row * dim, dim * static_cast<int64_t>(sizeof(Stored)));
    if constexpr (kOptimizer == Optimizer::kRowwiseAdagrad) __builtin_prefetch(table_.slot[0] + row, kWrite ? 1 : 0, 3);
    if constexpr (kColumnSlots > 0) jaxrec::Fetch<kWrite>(table_.slot[0] + row * dim, dim * 4);
    if constexpr (kColumnSlots > 1) jaxrec::Fetch<kWrite>(table_.slot[1] + row * dim, dim * 4);
  }

  void Row(int64_t part, const Occurrence& first, const float* sum) {
    const int64_t row = first.row, dim = table_.dim;
    Magnitudes& most = magnitudes_[part];
    float row_scale = 0.0f;
    if constexpr (kOptimizer == Optimizer::kRowwiseAdagrad) {
      const float scale = rule_.gradient_scale;
      const float square = rule_.mean_square ? rule_.mean_square[first.position] * scale * scale
                                             : SumOfSquares(sum, dim, scale) / static_cast<float>(dim);
      const float accumulator = table_.slot[0][row] + square;
      const float denominator = std::sqrt(accumulator) + rule_.eps;
      row_scale = denominator > 0.0f ? rule_.rate / denominator : 0.0f;
      if constexpr (kWrite) table_.slot[0][row] = accumulator;
      most.value[2][0] = Larger(most.value[2][0], Magnitude(accumulator));
    }
    const uint32_t draw = rule_.draw ? rule_.draw[first.position] : 0;
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) Columns<kLanes>(row * dim + d, sum + d, row_scale, draw, d, most);
    for (; d < dim; ++d) Columns<1>(row * dim + d, sum + d, row_scale, draw, d, most);
  }

  Magnitudes All() const {
    Magnitudes all;
    for (const Magnitudes& of_part : magnitudes_) all.Add(of_part);
    return all;
  }

 private:
  using Stored = typename Number::Stored;
  static constexpr int kColumnSlots = kOptimizer == Optimizer::kAdam       ? 2
                                      : kOptimizer == Optimizer::kAdagrad  ? 1
                                      : kOptimizer == Optimizer::kMomentum ? 1
                                                                           : 0;
  Stored* Weights() const { return static_cast<Stored*>(table_.weights); }

  // Updates kCount columns; `at` counts from the table's first element, d from the row's.
  template <int kCount>
  inline void Columns(int64_t at, const float* __restrict__ sum, float row_scale, uint32_t draw, int64_t d, Magnitudes& most) const {
    Stored* __restrict__ const weights = Weights() + at;
    float* __restrict__ const slot0 = kColumnSlots > 0 ? table_.slot[0] + at : nullptr;
    float* __restrict__ const slot1 = kColumnSlots > 1 ? table_.slot[1] + at : nullptr;
    const float gradient_scale = rule_.gradient_scale, rate = rule_.rate, decay = rule_.decay, eps = rule_.eps;
    const float b1 = rule_.b1, b2 = rule_.b2, adam_rate = rule_.adam_rate, correction = rule_.adam_correction;
    const uint32_t first_column = rule_.first_column + static_cast<uint32_t>(d);
    for (int j = 0; j < kCount; ++j) {
      const float g = sum[j] * gradient_scale;
      float step;
      if constexpr (kOptimizer == Optimizer::kSgd) {
        step = rate * g;
      } else if constexpr (kOptimizer == Optimizer::kMomentum) {
        const float velocity = b1 * slot0[j] + g;
        step = rate * velocity;
        if constexpr (kWrite) slot0[j] = velocity;
        most.value[2][j] = Larger(most.value[2][j], Magnitude(velocity));
      } else if constexpr (kOptimizer == Optimizer::kRowwiseAdagrad) {
        step = row_scale * g;
      } else if constexpr (kOptimizer == Optimizer::kAdagrad) {
        const float accumulator = slot0[j] + g * g;
        const float denominator = std::sqrt(accumulator) + eps;
        step = rate * (denominator > 0.0f ? g / denominator : 0.0f);
        if constexpr (kWrite) slot0[j] = accumulator;
        most.value[2][j] = Larger(most.value[2][j], Magnitude(accumulator));
      } else {
        const float m = b1 * slot0[j] + (1.0f - b1) * g;
        const float v = b2 * slot1[j] + (1.0f - b2) * g * g;
        const float denominator = std::sqrt(v / correction) + eps;
        step = adam_rate * (denominator > 0.0f ? m / denominator : 0.0f);
        if constexpr (kWrite) slot0[j] = m;
        if constexpr (kWrite) slot1[j] = v;
        most.value[2][j] = Larger(most.value[2][j], Magnitude(m));
        most.value[3][j] = Larger(most.value[3][j], Magnitude(v));
      }
      const float old = Number::Load(weights + j);
      const float delta = -step - decay * old;
      const uint32_t bits = Number::kNarrow ? MixColumn(draw, first_column + static_cast<uint32_t>(j)) : 0;
      const float updated = Number::Round(old + delta, bits);
      if constexpr (kWrite) Number::Store(weights + j, updated);
      most.value[1][j] = Larger(most.value[1][j], Magnitude(updated));
      most.value[0][j] = Larger(most.value[0][j], Number::kNarrow ? Magnitude(updated) : Magnitude(delta));
    }
  }

  const Table& table_;
  const Rule& rule_;
  std::vector<Magnitudes> magnitudes_;
};

template <class Number, Optimizer kOptimizer, bool kWrite>
std::string VisitUpdate(const Bags& bags, const Table& table, const Rule& rule, const float* gradient, Magnitudes* out,
                        Runner& runner) {
  UpdateRows<Number, kOptimizer, kWrite> visitor(table, rule);
  std::string wrong = VisitRows(bags, gradient, table.dim, table.rows, visitor, runner);
  if (wrong.empty()) *out = visitor.All();
  return wrong;
}

template <class Number, bool kWrite>
std::string VisitOptimizer(const Bags& bags, const Table& table, const Rule& rule, const float* gradient, Magnitudes* out,
                           Runner& runner) {
  switch (rule.optimizer) {
    case Optimizer::kSgd:
      return VisitUpdate<Number, Optimizer::kSgd, kWrite>(bags, table, rule, gradient, out, runner);
    case Optimizer::kMomentum:
      return VisitUpdate<Number, Optimizer::kMomentum, kWrite>(bags, table, rule, gradient, out, runner);
    case Optimizer::kRowwiseAdagrad:
      return VisitUpdate<Number, Optimizer::kRowwiseAdagrad, kWrite>(bags, table, rule, gradient, out, runner);
    case Optimizer::kAdagrad:
      return VisitUpdate<Number, Optimizer::kAdagrad, kWrite>(bags, table, rule, gradient, out, runner);
    case Optimizer::kAdam:
      return VisitUpdate<Number, Optimizer::kAdam, kWrite>(bags, table, rule, gradient, out, runner);
  }
  return "unknown optimizer";
}

template <bool kWrite>
std::string Visit(const Bags& bags, const Table& table, const Rule& rule, const float* gradient, Magnitudes* out,
                  Runner& runner) {
  switch (table.dtype) {
    case Dtype::kFloat32:
      return VisitOptimizer<Float32, kWrite>(bags, table, rule, gradient, out, runner);
    case Dtype::kBfloat16:
      return VisitOptimizer<Bfloat16, kWrite>(bags, table, rule, gradient, out, runner);
    case Dtype::kFloat16:
      return VisitOptimizer<Float16, kWrite>(bags, table, rule, gradient, out, runner);
    case Dtype::kInt8:
      return "tables of int8 are for lookup only";
  }
  return "unknown type";
}

// Whether no update by gradients up to `gradient` can reach what the type cannot hold. The bounds are those of the rules'
// formulas, in double, with room for rounding; magnitudes below float32's least normal number count as zero (FlushSubnormals).
bool IsSafe(const Table& table, const Rule& rule, const Largest& largest, double gradient) {
  const double g = gradient * std::fabs(rule.gradient_scale);
  const double least = std::max<double>(rule.eps, 1e-19);
  const double rate = std::fabs(rule.rate);
  double slot0 = largest.value[1], slot1 = largest.value[2], step = 0;
  switch (rule.optimizer) {
    case Optimizer::kSgd:
      step = rate * g;
      break;
    case Optimizer::kMomentum:
      slot0 = std::fabs(rule.b1) * slot0 + g;
      step = rate * slot0;
      break;
    case Optimizer::kRowwiseAdagrad:
      // g / sqrt(mean(g^2)) is at most sqrt(D), unless the columns of other devices are in the mean.
      step = rate * (rule.mean_square ? g / least : 2 * std::sqrt(static_cast<double>(table.dim)) + 2);
      slot0 += rule.mean_square ? HUGE_VAL : g * g;
      break;
    case Optimizer::kAdagrad:
      step = rate * 4;
      slot0 += g * g;
      break;
    case Optimizer::kAdam:
      step = std::fabs(static_cast<double>(rule.adam_rate)) * (slot0 + g) / least;
      slot0 += g;
      slot1 += g * g;
      break;
  }
  const double weight = largest.value[0] * (1 + std::fabs(rule.decay)) + step;
  const double most = table.dtype == Dtype::kFloat16 ? 65504.0 : FLT_MAX;
  const auto fits = [](double x, double limit) { return x < limit / 2; };  // Not where x is NaN.
  return fits(weight, most) && fits(step, FLT_MAX) && fits(slot0, FLT_MAX) && fits(slot1, FLT_MAX) && fits(g * g * table.dim, FLT_MAX);
}

}  // namespace

std::string Lookup(const Bags& bags, const Table& table, float* out, Runner& runner) {
  switch (table.dtype) {
    case Dtype::kFloat32:
      return LookupRows(bags, table, RowsOf<Float32>{static_cast<const float*>(table.weights)}, out, runner);
    case Dtype::kBfloat16:
      return LookupRows(bags, table, RowsOf<Bfloat16>{static_cast<const uint16_t*>(table.weights)}, out, runner);
    case Dtype::kFloat16:
      return LookupRows(bags, table, RowsOf<Float16>{static_cast<const uint16_t*>(table.weights)}, out, runner);
    case Dtype::kInt8:
      return LookupRows(bags, table, RowsOfInt8{static_cast<const int8_t*>(table.weights), table.scale}, out, runner);
  }
  return "unknown type";
}

std::string AddUp(const Bags& bags, const float* gradient, int64_t dim, int64_t rows, float* out, Runner& runner) {
  constexpr int64_t kPiece = 1 << 18;
  runner.Run(CeilDiv(rows * dim, kPiece), [&](int64_t piece) {
    const int64_t begin = piece * kPiece;
    std::fill(out + begin, out + std::min(begin + kPiece, rows * dim), 0.0f);
  });
  WriteSum visitor{dim, out};
  return VisitRows(bags, gradient, dim, rows, visitor, runner);
}

std::string RowSquares(const Bags& bags, const float* gradient, int64_t dim, int64_t rows, float* out, Runner& runner) {
  std::fill(out, out + bags.batch * bags.slots, 0.0f);
  WriteSquares visitor{dim, out};
  return VisitRows(bags, gradient, dim, rows, visitor, runner);
}

std::string Check(const Bags& bags, const Table& table, const Rule& rule, const float* gradient, const Largest& largest,
                  bool* bad_vector, bool* bad_update, Runner& runner) {
  const int64_t width = bags.vectors * table.dim;
  const int64_t per_piece = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, width));
  const int64_t pieces = CeilDiv(bags.batch, per_piece);
  // Sixteen maxima per vector and piece, so that columns are compared, not reduced.
  std::vector<uint32_t> most(pieces * bags.vectors);
  std::vector<uint32_t> most_weight(pieces);
  runner.Run(pieces, [&](int64_t piece) {
    const int64_t begin = piece * per_piece, end = std::min(bags.batch, begin + per_piece);
    uint32_t* const of_piece = most.data() + piece * bags.vectors;
    for (int64_t b = begin; b < end; ++b) {
      for (int64_t v = 0; v < bags.vectors; ++v) {
        const float* const g = gradient + b * width + v * table.dim;
        uint32_t m = of_piece[v];
        for (int64_t d = 0; d < table.dim; ++d) m = Larger(m, Magnitude(g[d]));
        of_piece[v] = m;
      }
    }
    uint32_t m = 0;
    for (int64_t p = begin * bags.slots; bags.weight && p < end * bags.slots; ++p) m = Larger(m, Magnitude(bags.weight[p]));
    most_weight[piece] = m;
  });
  uint32_t most_of_all = 0, weight = bags.weight ? 0 : BitsOf(1.0f);
  for (int64_t v = 0; v < bags.vectors; ++v) {
    uint32_t m = 0;
    for (int64_t piece = 0; piece < pieces; ++piece) m = Larger(m, most[piece * bags.vectors + v]);
    bad_vector[v] = m >= kInfinity;
    most_of_all = Larger(most_of_all, m);
  }
  for (const uint32_t m : most_weight) weight = Larger(weight, m);
  *bad_update = false;
  // Every occurrence might be of one row.
  const double occurrences = static_cast<double>(bags.batch) * static_cast<double>(bags.slots);
  if (IsSafe(table, rule, largest, static_cast<double>(FloatOf(most_of_all)) * FloatOf(weight) * occurrences)) return "";
  Magnitudes would_be;
  std::string wrong = Visit<false>(bags, table, rule, gradient, &would_be, runner);
  *bad_update = would_be.Most(0) >= kInfinity || would_be.Most(2) >= kInfinity || would_be.Most(3) >= kInfinity;
  return wrong;
}

std::string Update(const Bags& bags, const Table& table, const Rule& rule, const float* gradient, Largest* largest,
                   Runner& runner) {
  Magnitudes written;
  std::string wrong = Visit<true>(bags, table, rule, gradient, &written, runner);
  for (int k = 0; k < 1 + kMaxSlots; ++k)
    largest->value[k] = FloatOf(Larger(Magnitude(largest->value[k]), written.Most(1 + k)));
  return wrong;
}

}  // namespace jaxrec
