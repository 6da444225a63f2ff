// libcublas.so.11, simulated: the functions that MXNet calls. Matrices are column-major.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gemm.h"
#include "sim.h"

using cuda_sim::bytes;
using cuda_sim::enqueue;
using cuda_sim::gemm;
using cuda_sim::Half;
using cuda_sim::Matrix;

extern "C" int cudaStreamSynchronize(void* stream);

namespace {

enum Status { kSuccess = 0, kInvalidValue = 7 };
enum Operation { kAsIs = 0, kTransposed = 1, kConjugateTransposed = 2 };
enum Fill { kLower = 0, kUpper = 1 };
enum Diagonal { kNonUnit = 0, kUnit = 1 };
enum Side { kLeft = 0, kRight = 1 };
enum PointerMode { kOnHost = 0, kOnDevice = 1 };

// cudaDataType, as far as MXNet uses it; cublasComputeType starts at 64.
enum DataType { kFloat = 0, kDouble = 1, kHalf = 2, kInt8 = 3, kInt32 = 10 };
enum ComputeType { kComputeHalf = 64, kComputeFloat = 68, kComputeDouble = 70, kComputeInt32 = 72 };

struct Handle {
  void* stream = nullptr;
  int math_mode = 0;
  int pointer_mode = kOnHost;
};

// A factor given by its address: on the host it is read at the call, on the device when the stream
// comes to it.
template <typename T>
class Scalar {
 public:
  Scalar(const Handle* handle, const void* address)
      : on_device_(handle->pointer_mode == kOnDevice ? static_cast<const T*>(address) : nullptr),
        value_(on_device_ ? T(0) : *static_cast<const T*>(address)) {}
  T read() const { return on_device_ ? *bytes(on_device_) : value_; }

 private:
  const T* on_device_;
  T value_;
};

template <typename T>
Matrix<T> column_major(T* data, long leading_dimension, int operation = kAsIs) {
  if (operation == kAsIs) return {data, 1, leading_dimension};
  return {data, leading_dimension, 1};
}

// What all the gemm functions are given, less the factors.
struct Product {
  int operation_a, operation_b, rows, columns, depth;
  const void* a;
  long leading_a, stride_a;
  const void* b;
  long leading_b, stride_b;
  void* c;
  long leading_c, stride_c;
  int num_matrices;
};

// A sum of float16 numbers is formed in float32, as tensor cores do.
template <typename Scale>
using SumOf = std::conditional_t<std::is_same<Scale, Half>::value, float, Scale>;

template <typename Sum, typename Scale, typename In, typename Out>
int multiply(Handle* handle, const char* name, const Product& product, const void* alpha_address,
             const void* beta_address) {
  if (product.rows < 0 || product.columns < 0 || product.depth < 0) return kInvalidValue;
  const Scalar<Scale> alpha(handle, alpha_address), beta(handle, beta_address);
  enqueue(handle->stream, name, [=] {
    // Scaled in the type of the sums: 65504 is the largest float16.
    const Sum scale = static_cast<Sum>(alpha.read()), kept = static_cast<Sum>(beta.read());
    for (int i = 0; i < product.num_matrices; i++) {
      const In* a = bytes(static_cast<const In*>(product.a)) + i * product.stride_a;
      const In* b = bytes(static_cast<const In*>(product.b)) + i * product.stride_b;
      Out* c = bytes(static_cast<Out*>(product.c)) + i * product.stride_c;
      gemm<Sum>(product.rows, product.columns, product.depth, scale,
                column_major(a, product.leading_a, product.operation_a),
                column_major(b, product.leading_b, product.operation_b), kept,
                column_major(c, product.leading_c));
    }
  });
  return kSuccess;
}

template <typename T>
int multiply_one_type(Handle* handle, const char* name, const Product& product, const T* alpha,
                      const T* beta) {
  return multiply<SumOf<T>, T, T, T>(handle, name, product, alpha, beta);
}

// cublasComputeType, or cudaDataType in programs written for CUDA 10: the type of alpha and beta.
int scale_type(int compute_type) {
  switch (compute_type) {
    case kComputeHalf:
    case kComputeHalf + 1:  // "pedantic": without the rounding of tensor cores
      return kHalf;
    case kComputeFloat:
    case kComputeFloat + 1:
    case 74:  // three that allow inputs to be rounded to float16, bfloat16 or TF32
    case 75:
    case 77:
      return kFloat;
    case kComputeDouble:
    case kComputeDouble + 1:
      return kDouble;
    case kComputeInt32:
    case kComputeInt32 + 1:
      return kInt32;
    default:
      return compute_type;
  }
}

int multiply_any_type(Handle* handle, const char* name, const Product& product, const void* alpha,
                      const void* beta, int type_a, int type_b, int type_c, int compute_type) {
  const int scale = scale_type(compute_type);
  if (type_a == type_b) {
    if (type_a == kFloat && type_c == kFloat && scale == kFloat)
      return multiply<float, float, float, float>(handle, name, product, alpha, beta);
    if (type_a == kDouble && type_c == kDouble && scale == kDouble)
      return multiply<double, double, double, double>(handle, name, product, alpha, beta);
    if (type_a == kHalf && type_c == kHalf && scale == kFloat)
      return multiply<float, float, Half, Half>(handle, name, product, alpha, beta);
    if (type_a == kHalf && type_c == kHalf && scale == kHalf)
      return multiply<float, Half, Half, Half>(handle, name, product, alpha, beta);
    if (type_a == kHalf && type_c == kFloat && scale == kFloat)
      return multiply<float, float, Half, float>(handle, name, product, alpha, beta);
    if (type_a == kInt8 && type_c == kInt32 && scale == kInt32)
      return multiply<int32_t, int32_t, int8_t, int32_t>(handle, name, product, alpha, beta);
  }
  cuda_sim::stop("%s of data types %d, %d and %d with compute type %d is not simulated", name,
                 type_a, type_b, type_c, compute_type);
}

// ---- Triangular matrices: op(A) is copied to a dense matrix with zeros, the rest is general.

template <typename T>
std::vector<T> dense_triangle(const T* a, long leading_dimension, int size, int fill, int operation,
                              int diagonal) {
  std::vector<T> dense(static_cast<size_t>(size) * size, T(0));
  const Matrix<T> result = column_major(dense.data(), size, operation);
  for (int column = 0; column < size; column++) {
    const int begin = fill == kUpper ? 0 : column, end = fill == kUpper ? column + 1 : size;
    for (int row = begin; row < end; row++)
      result(row, column) = a[row + column * leading_dimension];
    if (diagonal == kUnit) result(column, column) = T(1);
  }
  return dense;
}

// Solve triangle @ solution = right_side in place, column after column.
template <typename T>
void substitute(Matrix<const T> triangle, bool lower, int size, int num_columns,
                Matrix<T> solution) {
  for (int column = 0; column < num_columns; column++) {
    for (int i = 0; i < size; i++) {
      const int row = lower ? i : size - 1 - i;
      T value = solution(row, column);
      for (int k = lower ? 0 : row + 1; k < (lower ? row : size); k++)
        value -= triangle(row, k) * solution(k, column);
      solution(row, column) = value / triangle(row, row);
    }
  }
}

template <typename T>
int solve_triangular(Handle* handle, const char* name, int side, int fill, int operation,
                     int diagonal, int rows, int columns, const T* alpha_address, const T* a,
                     int leading_a, T* b, int leading_b) {
  const Scalar<T> alpha(handle, alpha_address);
  enqueue(handle->stream, name, [=] {
    const int size = side == kLeft ? rows : columns;
    const auto dense = dense_triangle(bytes(a), leading_a, size, fill, operation, diagonal);
    const Matrix<T> solution = column_major(bytes(b), leading_b);
    const T scale = alpha.read();
    for (int column = 0; column < columns; column++)
      for (int row = 0; row < rows; row++) solution(row, column) *= scale;
    const Matrix<const T> triangle = column_major(dense.data(), size);
    const bool lower = (fill == kLower) == (operation == kAsIs);
    if (side == kLeft)
      substitute(triangle, lower, size, columns, solution);
    else  // X @ A = B is the transposed A.T @ X.T = B.T
      substitute(triangle.transposed(), !lower, size, rows, solution.transposed());
  });
  return kSuccess;
}

template <typename T>
int multiply_triangular(Handle* handle, const char* name, int side, int fill, int operation,
                        int diagonal, int rows, int columns, const T* alpha_address, const T* a,
                        int leading_a, const T* b, int leading_b, T* c, int leading_c) {
  const Scalar<T> alpha(handle, alpha_address);
  enqueue(handle->stream, name, [=] {
    const int size = side == kLeft ? rows : columns;
    const auto dense = dense_triangle(bytes(a), leading_a, size, fill, operation, diagonal);
    const Matrix<const T> triangle = column_major(dense.data(), size);
    const Matrix<const T> other = column_major(bytes(b), leading_b);
    std::vector<T> product(static_cast<size_t>(rows) * columns);  // b and c may be one matrix
    gemm<T>(rows, columns, size, alpha.read(), side == kLeft ? triangle : other,
            side == kLeft ? other : triangle, T(0), column_major(product.data(), rows));
    for (int column = 0; column < columns; column++)
      std::copy_n(&product[static_cast<size_t>(column) * rows], rows,
                  bytes(c) + static_cast<long>(column) * leading_c);
  });
  return kSuccess;
}

template <typename T>
int dot(Handle* handle, const char* name, int size, const T* x, int step_x, const T* y, int step_y,
        T* result) {
  // A negative step starts at the end.
  const long begin_x = step_x < 0 ? (1L - size) * step_x : 0;
  const long begin_y = step_y < 0 ? (1L - size) * step_y : 0;
  enqueue(handle->stream, name, [=] {
    const T *left = bytes(x) + begin_x, *right = bytes(y) + begin_y;
    double sum = 0;
    for (long i = 0; i < size; i++) sum += double(left[i * step_x]) * double(right[i * step_y]);
    *bytes(result) = static_cast<T>(sum);
  });
  // The caller reads a result on the host as soon as the call returns.
  if (handle->pointer_mode == kOnHost) cudaStreamSynchronize(handle->stream);
  return kSuccess;
}

}  // namespace

extern "C" {

int cublasCreate_v2(Handle** handle) {
  *handle = new Handle;
  return kSuccess;
}

int cublasDestroy_v2(Handle* handle) {
  delete handle;
  return kSuccess;
}

int cublasSetStream_v2(Handle* handle, void* stream) {
  handle->stream = stream;
  return kSuccess;
}

int cublasSetPointerMode_v2(Handle* handle, int mode) {
  handle->pointer_mode = mode;
  return kSuccess;
}

int cublasGetMathMode(Handle* handle, int* mode) {
  *mode = handle->math_mode;
  return kSuccess;
}

int cublasSetMathMode(Handle* handle, int mode) {
  handle->math_mode = mode;
  return kSuccess;
}

// Two functions of one shape for float (letter S) and double (letter D).
#define CUDA_SIM_GEMM(LETTER, T)                                                                  \
  int cublas##LETTER##gemm_v2(Handle* handle, int operation_a, int operation_b, int rows,         \
                              int columns, int depth, const T* alpha, const T* a, int leading_a,  \
                              const T* b, int leading_b, const T* beta, T* c, int leading_c) {    \
    return multiply_one_type(handle, "cublas" #LETTER "gemm",                                     \
                             {operation_a, operation_b, rows, columns, depth, a, leading_a, 0, b, \
                              leading_b, 0, c, leading_c, 0, 1},                                  \
                             alpha, beta);                                                        \
  }
CUDA_SIM_GEMM(S, float)
CUDA_SIM_GEMM(D, double)

#define CUDA_SIM_GEMM_STRIDED_BATCHED(LETTER, T)                                                  \
  int cublas##LETTER##gemmStridedBatched(                                                         \
      Handle* handle, int operation_a, int operation_b, int rows, int columns, int depth,         \
      const T* alpha, const T* a, int leading_a, long long stride_a, const T* b, int leading_b,   \
      long long stride_b, const T* beta, T* c, int leading_c, long long stride_c,                 \
      int num_matrices) {                                                                         \
    return multiply_one_type(handle, "cublas" #LETTER "gemmStridedBatched",                       \
                             {operation_a, operation_b, rows, columns, depth, a, leading_a,       \
                              stride_a, b, leading_b, stride_b, c, leading_c, stride_c,           \
                              num_matrices},                                                      \
                             alpha, beta);                                                        \
  }
CUDA_SIM_GEMM_STRIDED_BATCHED(H, Half)
CUDA_SIM_GEMM_STRIDED_BATCHED(S, float)
CUDA_SIM_GEMM_STRIDED_BATCHED(D, double)

int cublasSgemmEx(Handle* handle, int operation_a, int operation_b, int rows, int columns,
                  int depth, const float* alpha, const void* a, int type_a, int leading_a,
                  const void* b, int type_b, int leading_b, const float* beta, void* c, int type_c,
                  int leading_c) {
  return multiply_any_type(handle, "cublasSgemmEx",
                           {operation_a, operation_b, rows, columns, depth, a, leading_a, 0, b,
                            leading_b, 0, c, leading_c, 0, 1},
                           alpha, beta, type_a, type_b, type_c, kComputeFloat);
}

int cublasGemmEx(Handle* handle, int operation_a, int operation_b, int rows, int columns, int depth,
                 const void* alpha, const void* a, int type_a, int leading_a, const void* b,
                 int type_b, int leading_b, const void* beta, void* c, int type_c, int leading_c,
                 int compute_type, int /*algorithm*/) {
  return multiply_any_type(handle, "cublasGemmEx",
                           {operation_a, operation_b, rows, columns, depth, a, leading_a, 0, b,
                            leading_b, 0, c, leading_c, 0, 1},
                           alpha, beta, type_a, type_b, type_c, compute_type);
}

int cublasGemmStridedBatchedEx(Handle* handle, int operation_a, int operation_b, int rows,
                               int columns, int depth, const void* alpha, const void* a, int type_a,
                               int leading_a, long long stride_a, const void* b, int type_b,
                               int leading_b, long long stride_b, const void* beta, void* c,
                               int type_c, int leading_c, long long stride_c, int num_matrices,
                               int compute_type, int /*algorithm*/) {
  return multiply_any_type(handle, "cublasGemmStridedBatchedEx",
                           {operation_a, operation_b, rows, columns, depth, a, leading_a, stride_a,
                            b, leading_b, stride_b, c, leading_c, stride_c, num_matrices},
                           alpha, beta, type_a, type_b, type_c, compute_type);
}

#define CUDA_SIM_BLAS(LETTER, T)                                                                  \
  int cublas##LETTER##dot_v2(Handle* handle, int size, const T* x, int step_x, const T* y,        \
                             int step_y, T* result) {                                             \
    return dot(handle, "cublas" #LETTER "dot", size, x, step_x, y, step_y, result);               \
  }                                                                                               \
  int cublas##LETTER##trsm_v2(Handle* handle, int side, int fill, int operation, int diagonal,    \
                              int rows, int columns, const T* alpha, const T* a, int leading_a,   \
                              T* b, int leading_b) {                                              \
    return solve_triangular(handle, "cublas" #LETTER "trsm", side, fill, operation, diagonal,     \
                            rows, columns, alpha, a, leading_a, b, leading_b);                    \
  }                                                                                               \
  int cublas##LETTER##trmm_v2(Handle* handle, int side, int fill, int operation, int diagonal,    \
                              int rows, int columns, const T* alpha, const T* a, int leading_a,   \
                              const T* b, int leading_b, T* c, int leading_c) {                   \
    return multiply_triangular(handle, "cublas" #LETTER "trmm", side, fill, operation, diagonal,  \
                               rows, columns, alpha, a, leading_a, b, leading_b, c, leading_c);   \
  }
CUDA_SIM_BLAS(S, float)
CUDA_SIM_BLAS(D, double)

}  // extern "C"
