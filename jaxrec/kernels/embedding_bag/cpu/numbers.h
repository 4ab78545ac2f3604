// Number types of tables, sixteen at a time, and stochastic rounding to the narrow ones.

#ifndef JAXREC_KERNELS_EMBEDDING_BAG_NUMBERS_H_
#define JAXREC_KERNELS_EMBEDDING_BAG_NUMBERS_H_

#include <cmath>
#include <cstdint>
#include <cstring>

namespace jaxrec {
namespace {

constexpr int64_t kLanes = 16;
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));

inline float SumOfLanes(const Floats& lanes) {
  typedef float Half __attribute__((vector_size(32)));
  typedef float Quarter __attribute__((vector_size(16)));
  Half half[2];
  std::memcpy(half, &lanes, sizeof(half));
  half[0] += half[1];
  Quarter quarter[2];
  std::memcpy(quarter, half, sizeof(quarter));
  quarter[0] += quarter[1];
  const Quarter q = quarter[0];
  return (q[0] + q[2]) + (q[1] + q[3]);
}

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// The order of magnitudes is that of these integers, and what is not finite is at or above kInfinity.
inline uint32_t Magnitude(float x) { return BitsOf(x) & 0x7FFFFFFFu; }
constexpr uint32_t kInfinity = 0x7F800000u;

inline uint32_t Larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

struct Float32 {
  using Stored = float;
  static constexpr bool kNarrow = false;
  static float Load(const float* p) { return *p; }
  static void Store(float* p, float x) { *p = x; }
  static float Round(float x, uint32_t) { return x; }
};

struct Bfloat16 {
  using Stored = uint16_t;
  static constexpr bool kNarrow = true;
  static float Load(const uint16_t* p) { return FloatOf(static_cast<uint32_t>(*p) << 16); }
  static void Store(uint16_t* p, float x) { *p = static_cast<uint16_t>(BitsOf(x) >> 16); }
  // bfloat16 is the upper half of float32: adding 16 random bits carries into it with the right probability.
  static float Round(float x, uint32_t draw) {
    const uint32_t bits = BitsOf(x);
    const uint32_t rounded = (bits + (draw >> 16)) & 0xFFFF0000u;
    // The bits of a NaN, increased, may be those of a number; shortened, they may be those of an infinity: both are bad.
    return FloatOf((bits & 0x7FFFFFFFu) >= kInfinity ? (bits & 0xFFFF0000u) | 0x00400000u * ((bits & 0x7FFFFFu) != 0)
                                                     : rounded);
  }
};

struct Float16 {
  using Stored = uint16_t;
  static constexpr bool kNarrow = true;
  // Below 2^-14 a multiple of 2^-24, computed from its integer: as float32's subnormal it would count as zero.
  static float Load(const uint16_t* p) {
    const uint32_t h = *p, fraction = h & 0x3FFu, exponent = h & 0x7C00u;
    const uint32_t small = BitsOf(static_cast<float>(static_cast<int32_t>(fraction)) * 0x1p-24f);
    const uint32_t normal = ((h & 0x7FFFu) << 13) + (112u << 23);
    const uint32_t special = kInfinity | (fraction << 13);
    return FloatOf(((h & 0x8000u) << 16) | (exponent == 0 ? small : exponent == 0x7C00u ? special : normal));
  }
  // Of a value that Round returned: one of the type, or not finite.
  static void Store(uint16_t* p, float x) {
    const uint32_t magnitude = Magnitude(x);
    const uint32_t small = static_cast<uint32_t>(static_cast<int32_t>(FloatOf(magnitude < kInfinity ? magnitude : 0) * 0x1p24f));
    const uint32_t normal = (magnitude - (112u << 23)) >> 13;
    const uint32_t special = magnitude > kInfinity ? 0x7E00u : 0x7C00u;
    const uint32_t h = magnitude >= kInfinity ? special : magnitude < (113u << 23) ? small : normal;
    *p = static_cast<uint16_t>(((BitsOf(x) >> 16) & 0x8000u) | h);
  }
  // 11 significant bits, but for numbers below 2^-14 a fixed step of 2^-24.
  static float Round(float x, uint32_t draw) {
    const uint32_t magnitude = Magnitude(x);
    int32_t exponent = static_cast<int32_t>(magnitude >> 23) - 127;
    exponent = (exponent < -14 ? -14 : exponent) - 10;
    const float step = FloatOf(static_cast<uint32_t>(exponent + 127) << 23);
    const float per_step = FloatOf(static_cast<uint32_t>(127 - exponent) << 23);
    const float steps = FloatOf(magnitude) * per_step;  // Exact: both are powers of two.
    const float below = static_cast<float>(static_cast<int32_t>(steps < 4096.0f ? steps : 4096.0f));
    const float up = static_cast<float>(draw >> 8) * 0x1p-24f < steps - below ? 1.0f : 0.0f;
    const uint32_t rounded = BitsOf((below + up) * step);
    const uint32_t limited = rounded >= BitsOf(65536.0f) ? kInfinity : rounded;
    return FloatOf((BitsOf(x) & 0x80000000u) | (magnitude >= kInfinity ? magnitude : limited));
  }
};

// The last coordinate of jaxrec.counters.bits: mixes a column into the hash of all that precedes it.
inline uint32_t MixColumn(uint32_t state, uint32_t column) {
  uint32_t x = state ^ (column * 0x9E3779B1u + 0x85EBCA6Bu);
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// Subnormal numbers count as zero, as in XLA's own code; set for each piece of work, whatever its thread's setting is.
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(Get()) { Set(before_ | kBits); }
  ~FlushSubnormals() { Set(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kBits = 0x8040;
  static uint64_t Get() { return __builtin_ia32_stmxcsr(); }
  static void Set(uint64_t v) { __builtin_ia32_ldmxcsr(static_cast<uint32_t>(v)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kBits = 1u << 24;
  static uint64_t Get() {
    uint64_t v;
    asm volatile("mrs %0, fpcr" : "=r"(v));
    return v;
  }
  static void Set(uint64_t v) { asm volatile("msr fpcr, %0" : : "r"(v)); }
#else
  static constexpr uint64_t kBits = 0;
  static uint64_t Get() { return 0; }
  static void Set(uint64_t) {}
#endif
  uint64_t before_;
};

}  // namespace
}  // namespace jaxrec

#endif  // JAXREC_KERNELS_EMBEDDING_BAG_NUMBERS_H_
