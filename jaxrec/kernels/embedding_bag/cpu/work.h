// Memory that is not cleared.

#ifndef JAXREC_KERNELS_EMBEDDING_BAG_WORK_H_
#define JAXREC_KERNELS_EMBEDDING_BAG_WORK_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace jaxrec {
namespace {

// An array of T, a type without constructors, that starts with whatever its memory held.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* Resize(int64_t size) {
    std::free(data_);
    data_ = static_cast<T*>(std::malloc(std::max<int64_t>(1, size) * sizeof(T)));
    if (!data_) throw std::bad_alloc();
    return data_;
  }
  const T* data() const { return data_; }

 private:
  T* data_ = nullptr;
};

}  // namespace
}  // namespace jaxrec

#endif  // JAXREC_KERNELS_EMBEDDING_BAG_WORK_H_
