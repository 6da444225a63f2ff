// The scalar functions of MXNet's elementwise operators, their derivatives, and its reducers.
//
// Names and parameters are MXNet's: libmxnet.so asks for them in the names of its kernels.
#pragma once

#include <numeric>

#include "device.h"

namespace mxnet {
namespace op {
namespace mshadow_op {

using mshadow::isinf_typed::IsInf;
using mshadow::isnan_typed::IsNan;

// The type in which a function of a T is computed: float for float16 and float32, else double.
template <typename T>
using Real = std::conditional_t<
    std::is_same<T, double>::value || std::is_integral<T>::value, double, float>;

template <typename T>
Real<T> real(T value) {
  return static_cast<Real<T>>(value);
}

constexpr double kPi = 3.14159265358979323846;
// MXNet has some constants in float32 only, also where it computes in float64.
constexpr float kFloatPi = 3.14159265f;
constexpr float kSeluAlpha = 1.67326324235437728f;
constexpr float kSeluLambda = 1.05070098735548049f;

// x is `a` (and y is `b`) in the type of the computation, T the type of the result.
#define UNARY(name, ...)                  \
  struct name {                            \
    template <typename T>                  \
    static T Map(T a) {                    \
      [[maybe_unused]] auto x = real(a);   \
      return T(__VA_ARGS__);               \
    }                                      \
  };
#define BINARY(name, ...)                  \
  struct name {                            \
    template <typename T>                  \
    static T Map(T a, T b) {               \
      [[maybe_unused]] auto x = real(a);   \
      [[maybe_unused]] auto y = real(b);   \
      return T(__VA_ARGS__);               \
    }                                      \
  };
#define LOGIC_UNARY(name, ...)             \
  struct name {                            \
    template <typename T>                  \
    static bool Map(T a) {                 \
      return __VA_ARGS__;                  \
    }                                      \
  };
#define LOGIC_BINARY(name, ...)            \
  struct name {                            \
    template <typename A, typename B>      \
    static bool Map(A a, B b) {            \
      return __VA_ARGS__;                  \
    }                                      \
  };

// ---- Arithmetic.
UNARY(identity, a)
UNARY(identity_grad, 1)
UNARY(negation, -a)
UNARY(reciprocal, 1 / x)
UNARY(reciprocal_grad, -1 / (x * x))
UNARY(square, x * x)
UNARY(square_grad, 2 * x)
UNARY(square_root, std::sqrt(x))
UNARY(square_root_grad, Real<T>(0.5) / x)
UNARY(reciprocal_square_root, 1 / std::sqrt(x))
UNARY(reciprocal_square_root_grad, Real<T>(-0.5) / (std::sqrt(x) * x))
UNARY(cube_root, std::cbrt(x))
UNARY(cube_root_grad, 1 / (3 * x * x))
UNARY(reciprocal_cube_root, 1 / std::cbrt(x))
UNARY(reciprocal_cube_root_grad, -1 / (3 * std::cbrt(x) * x))
UNARY(abs, std::fabs(x))
UNARY(sign, (a > T(0)) - (a < T(0)))
UNARY(sign_grad, 0)
UNARY(degrees, x * (180 / kFloatPi))
UNARY(degrees_grad, 180 / kFloatPi)
UNARY(radians, x * (kFloatPi / 180))
UNARY(radians_grad, kFloatPi / 180)

BINARY(left, a)
BINARY(right, b)
BINARY(plus, a + b)
BINARY(minus, a - b)
BINARY(rminus, b - a)
BINARY(mul, a * b)
BINARY(div, a / b)
BINARY(div_grad, 1 / y)
BINARY(div_rgrad, -x / (y * y))
BINARY(rdiv, y / x)
BINARY(rdiv_grad, -y / (x * x))
BINARY(posone, 1)
BINARY(negone, -1)
BINARY(power, std::pow(x, y))
BINARY(power_grad, std::pow(x, y - 1) * y)
BINARY(power_rgrad, std::pow(x, y) * std::log(x))
BINARY(rpower, std::pow(y, x))
BINARY(rpower_grad, x * std::log(y))
BINARY(hypot, std::hypot(x, y))
BINARY(hypot_grad_left, x / std::hypot(x, y))
BINARY(hypot_grad_right, y / std::hypot(x, y))
BINARY(ldexp, x * std::exp2(y))
BINARY(ldexp_grad, std::exp2(y))
BINARY(ldexp_rgrad, x * std::exp2(y) * std::log(Real<T>(2)))
BINARY(rldexp, y * std::exp2(x))
BINARY(rldexp_grad, y * std::exp2(x) * std::log(Real<T>(2)))
BINARY(minus_sign, a - b > T(0) ? 1 : -1)
BINARY(copysign, (a >= T(0)) == (b >= T(0)) ? a : -a)
BINARY(copysign_grad, (a >= T(0)) == (b >= T(0)) ? 1 : -1)
BINARY(copysign_rgrad, 0)
BINARY(rcopysign, (a >= T(0)) == (b >= T(0)) ? b : -b)
BINARY(rcopysign_grad, 0)

// A remainder with the divisor's sign, computed in double; 0 where the divisor is 0.
template <typename T>
T remainder(T dividend, T divisor) {
  const double a = static_cast<double>(dividend), b = static_cast<double>(divisor);
  if (b == 0) return T(0);
  const double rest = std::fmod(a, b);
  return T(rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest);
}
template <typename T>
constexpr bool is_real = !std::is_integral<T>::value;

BINARY(mod, remainder(a, b))
BINARY(mod_grad, is_real<T> ? 1 : 0)
BINARY(mod_rgrad, is_real<T> ? -std::floor(x / y) : 0)
BINARY(rmod, remainder(b, a))
BINARY(rmod_grad, is_real<T> ? -std::floor(y / x) : 0)
BINARY(fmod, b == T(0) ? 0 : std::fmod(static_cast<double>(a), static_cast<double>(b)))
BINARY(rfmod, a == T(0) ? 0 : std::fmod(static_cast<double>(b), static_cast<double>(a)))

// ---- Exponential, trigonometric and hyperbolic functions.
UNARY(exp, std::exp(x))
UNARY(expm1, std::expm1(x))
UNARY(log, std::log(x))
UNARY(log_grad, 1 / x)
UNARY(log10, std::log10(x))
UNARY(log10_grad, Real<T>(0.43429448190325182765) / x)
UNARY(log2, std::log2(x))
UNARY(log2_grad, Real<T>(1.44269504088896340737) / x)
UNARY(log1p, std::log1p(x))
UNARY(log1p_grad, 1 / (1 + x))
UNARY(sin, std::sin(x))
UNARY(sin_grad, std::cos(x))
UNARY(cos, std::cos(x))
UNARY(cos_grad, -std::sin(x))
UNARY(tan, std::tan(x))
UNARY(tan_grad, x * x + 1)
UNARY(arcsin, std::asin(x))
UNARY(arcsin_grad, 1 / std::sqrt(1 - x * x))
UNARY(arccos, std::acos(x))
UNARY(arccos_grad, -1 / std::sqrt(1 - x * x))
UNARY(arctan, std::atan(x))
UNARY(arctan_grad, 1 / (x * x + 1))
UNARY(sinh, std::sinh(x))
UNARY(sinh_grad, std::cosh(x))
UNARY(cosh, std::cosh(x))
UNARY(cosh_grad, std::sinh(x))
UNARY(tanh, std::tanh(x))
UNARY(tanh_grad, 1 - x * x)
UNARY(arcsinh, std::asinh(x))
UNARY(arcsinh_grad, 1 / std::sqrt(x * x + 1))
UNARY(arccosh, std::acosh(x))
UNARY(arccosh_grad, 1 / std::sqrt(x * x - 1))
UNARY(arctanh, std::atanh(x))
UNARY(arctanh_grad, 1 / (1 - x * x))
BINARY(arctan2, std::atan2(x, y))
BINARY(arctan2_grad, y / (x * x + y * y))
BINARY(arctan2_rgrad, -x / (x * x + y * y))
BINARY(rarctan2, std::atan2(y, x))
BINARY(rarctan2_grad, x / (x * x + y * y))
UNARY(erf, std::erf(x))
UNARY(erf_grad, 2 / std::sqrt(kFloatPi) * std::exp(-x * x))
UNARY(erfinv_grad, std::sqrt(kFloatPi) / 2 * std::exp(x * x))

// The derivative of log(gamma(x)): shifted upwards to where its asymptotic series is accurate.
inline double digamma(double x) {
  if (x <= 0) {
    if (x == std::floor(x)) return INFINITY;
    return digamma(1 - x) - kPi / std::tan(kPi * x);
  }
  double shift = 0;
  for (; x < 10; x++) shift -= 1 / x;
  const double z = 1 / (x * x);
  const double series = z * (1. / 12 - z * (1. / 120 - z * (1. / 252 - z / 240)));
  return shift + std::log(x) - 0.5 / x - series;
}

// The inverse of erf, by Newton's method from an approximation with elementary functions.
inline double inverse_erf(double y) {
  if (!(std::fabs(y) < 1)) return std::fabs(y) == 1 ? std::copysign(INFINITY, y) : NAN;
  const double log_term = std::log1p(-y * y);
  const double half = 2 / (kPi * 0.147) + log_term / 2;
  double x = std::copysign(std::sqrt(std::sqrt(half * half - log_term / 0.147) - half), y);
  for (int step = 0; step < 4; step++) {
    x -= (std::erf(x) - y) * std::sqrt(kPi) / 2 * std::exp(x * x);
  }
  return x;
}

UNARY(erfinv, inverse_erf(x))
UNARY(gamma, std::tgamma(x))
UNARY(gamma_grad, std::tgamma(x) * digamma(x))
UNARY(gammaln_grad, digamma(x))
UNARY(gammaln, std::lgamma(x))

// ---- Rounding.
UNARY(round, std::round(x))
UNARY(ceil, std::ceil(x))
UNARY(floor, std::floor(x))
UNARY(trunc, std::trunc(x))
UNARY(fix, std::trunc(x))
UNARY(rint, x - std::floor(x) <= std::ceil(x) - x ? std::floor(x) : std::ceil(x))

// ---- Activations. The argument of a derivative is the output where MXNet passes the output.
UNARY(sigmoid, 1 / (1 + std::exp(-x)))
UNARY(sigmoid_grad, x * (1 - x))
UNARY(softsign, x / (1 + std::fabs(x)))
UNARY(softsign_grad, 1 / ((1 + std::fabs(x)) * (1 + std::fabs(x))))
UNARY(softrelu, x > 20 ? x : std::log1p(std::exp(x)))
UNARY(softrelu_grad, -std::expm1(-x))
UNARY(relu, IsNan(a) || a > T(0) ? a : T(0))
UNARY(relu_grad, IsNan(a) ? a : T(a > T(0)))
UNARY(selu, kSeluLambda * (x > 0 ? x : kSeluAlpha * std::expm1(x)))
UNARY(selu_grad, kSeluLambda * (x > 0 ? 1 : kSeluAlpha + x))

// Gaussian error linear unit, always in float32.
inline float gaussian_integral(float x) { return (1 + std::erf(x / std::sqrt(2.f))) / 2; }
inline float gaussian(float x) { return std::exp(-x * x / 2) / std::sqrt(2 * kFloatPi); }

UNARY(gelu, static_cast<float>(x) * gaussian_integral(static_cast<float>(x)))
BINARY(gelu_grad, gaussian_integral(static_cast<float>(x)) +
                      static_cast<float>(x) * gaussian(static_cast<float>(x)))
BINARY(prelu_grad, a > T(0) ? T(0) : a)
BINARY(xelu, a > T(0) ? a : T(static_cast<float>(a) * static_cast<float>(b)))
BINARY(xelu_grad, a > T(0) ? T(1) : b)
BINARY(elu, x > 0 ? x : y * std::expm1(x))
BINARY(elu_grad, x > 0 ? 1 : y + x)

// Quadratic for small `a`, linear for large; `b` squared is the inverse of the border.
BINARY(smooth_l1_loss, std::fabs(x) > 1 / (y * y) ? std::fabs(x) - Real<T>(0.5) / (y * y)
                                                   : Real<T>(0.5) * x * x * y * y)
BINARY(smooth_l1_gradient, std::fabs(x) > 1 / (y * y) ? (x > 0 ? 1 : -1) : y * y * x)

// ---- Comparison and logic.
BINARY(threshold, a < b)
BINARY(threshold_eq, a <= b)
BINARY(ge, a >= b)
BINARY(gt, a > b)
BINARY(le, a <= b)
BINARY(lt, a < b)
BINARY(eq, a == b)
BINARY(ne, a != b)
BINARY(logical_and, x != 0 && y != 0)
BINARY(logical_or, x != 0 || y != 0)
BINARY(logical_xor, (x != 0) != (y != 0))
BINARY(maximum, IsNan(a) || a > b ? a : b)
BINARY(minimum, IsNan(a) || a < b ? a : b)
BINARY(bitwise_and, static_cast<int64_t>(a) & static_cast<int64_t>(b))
BINARY(bitwise_or, static_cast<int64_t>(a) | static_cast<int64_t>(b))
BINARY(bitwise_xor, static_cast<int64_t>(a) ^ static_cast<int64_t>(b))
UNARY(nt, a == T(0))
UNARY(bitwise_not, std::is_same<T, bool>::value ? !a : ~static_cast<int64_t>(a))
LOGIC_UNARY(NonZero, a != T(0))
LOGIC_UNARY(np_logical_not, !(a != T(0)))
LOGIC_UNARY(isnan, IsNan(a))
LOGIC_UNARY(isinf, IsInf(a))
LOGIC_UNARY(isfinite, !IsNan(a) && !IsInf(a))
LOGIC_UNARY(isposinf, IsInf(a) && a > T(0))
LOGIC_UNARY(isneginf, IsInf(a) && a < T(0))
LOGIC_BINARY(np_greater, a > b)
LOGIC_BINARY(np_greater_equal, a >= b)
LOGIC_BINARY(np_less, a < b)
LOGIC_BINARY(np_less_equal, a <= b)
LOGIC_BINARY(np_equal, a == b)
LOGIC_BINARY(np_not_equal, a != b)
LOGIC_BINARY(np_logical_and, a != A(0) && b != B(0))
LOGIC_BINARY(np_logical_or, a != A(0) || b != B(0))
LOGIC_BINARY(np_logical_xor, (a != A(0)) != (b != B(0)))

// The least common multiple; 0 if a number is 0, and for types that are not integers.
struct lcm {
  template <typename T>
  static T Map(T a, T b) {
    if constexpr (std::is_integral<T>::value) {
      return T(std::lcm(a, b));
    } else {
      return T(0);
    }
  }
};

struct clip {
  template <typename T>
  static T Map(T value, T bound) {
    return Map(value, T(-bound), bound);
  }
  template <typename T>
  static T Map(T value, T lower, T upper) {
    return value > upper ? upper : value < lower ? lower : value;
  }
};

// ---- NumPy's operators of two types; the second operand has the result's type.
#define MIXED(name, expression)                    \
  struct mixed_##name {                            \
    template <typename A, typename T>              \
    static T Map(A left_operand, T b) {            \
      const T a = static_cast<T>(left_operand);    \
      return T(expression);                        \
    }                                              \
  };
MIXED(plus, a + b)
MIXED(minus, a - b)
MIXED(rminus, b - a)
MIXED(mul, a * b)
MIXED(power, power::Map(a, b))
MIXED(rpower, power::Map(b, a))
MIXED(mod, mod::Map(a, b))
MIXED(rmod, mod::Map(b, a))

// Division of integers gives a float.
struct true_divide {
  template <typename A, typename B>
  static auto Map(A a, B b) {
    using Result = std::conditional_t<std::is_integral<B>::value, float, B>;
    return Result(static_cast<Result>(a) / static_cast<Result>(b));
  }
};
struct rtrue_divide {
  template <typename A, typename B>
  static auto Map(A a, B b) {
    using Result = std::conditional_t<std::is_integral<B>::value, float, B>;
    return Result(static_cast<Result>(b) / static_cast<Result>(a));
  }
};

struct identity_with_cast {
  template <typename In, typename Out>
  static void Map(index_t i, Out* out, In* in) {
    out[i] = Out(in[i]);
  }
};

struct nansum_grad {
  template <typename T>
  static T Map(T a, T) {
    return T(IsNan(a) ? 0 : 1);
  }
};
struct nanprod_grad {
  template <typename T>
  static T Map(T a, T b) {
    return IsNan(a) ? T(0) : T(b / a);
  }
};

// ---- Reducers that mshadow lacks. `residual` is what the reducer needs besides its value: the
// lost digits of a compensated sum, or the scale of a norm.

struct sum {
  template <typename T>
  static void SetInitValue(T& value) {
    value = T(0);
  }
  template <typename T>
  static void SetInitValue(T& value, T& residual) {
    value = residual = T(0);
  }
  template <typename T, typename Source>
  static void Reduce(T& value, Source source) {
    value += T(source);
  }
  template <typename T, typename Source>
  static void Reduce(T& value, Source source, T& residual) {
    const T corrected = T(T(source) - residual);
    const T total = T(value + corrected);
    residual = T(T(total - value) - corrected);
    value = total;
  }
  template <typename... T>
  static void Finalize(T&...) {}
};

struct nansum : sum {
  template <typename T, typename Source, typename... Residual>
  static void Reduce(T& value, Source source, Residual&... residual) {
    if (!IsNan(source)) sum::Reduce(value, source, residual...);
  }
};

struct product {
  template <typename T, typename... Residual>
  static void SetInitValue(T& value, Residual&...) {
    value = T(1);
  }
  template <typename T, typename Source, typename... Residual>
  static void Reduce(T& value, Source source, Residual&...) {
    value *= T(source);
  }
  template <typename... T>
  static void Finalize(T&...) {}
};

struct nanprod : product {
  template <typename T, typename Source, typename... Residual>
  static void Reduce(T& value, Source source, Residual&...) {
    if (!IsNan(source)) value *= T(source);
  }
};

// The Euclidean norm: with a residual `value` is the sum of squares of the numbers divided by it.
struct nrm2 {
  template <typename T, typename... Residual>
  static void SetInitValue(T& value, Residual&... scale) {
    value = T(0);
    ((scale = T(0)), ...);
  }
  template <typename T, typename Source>
  static void Reduce(T& value, Source source) {
    value += T(source) * T(source);
  }
  template <typename T, typename Source>
  static void Reduce(T& value, Source source, T& scale) {
    if (source == Source(0)) return;
    const T magnitude = abs::Map(T(source));
    if (scale < magnitude) {
      const T ratio = T(scale / magnitude);
      value = T(1 + value * ratio * ratio);
      scale = magnitude;
    } else {
      const T ratio = T(magnitude / scale);
      value += T(ratio * ratio);
    }
  }
  template <typename T>
  static void Finalize(T& value) {
    value = square_root::Map(value);
  }
  template <typename T>
  static void Finalize(T& value, T& scale) {
    value = T(scale * square_root::Map(value));
  }
};

#undef UNARY
#undef BINARY
#undef LOGIC_UNARY
#undef LOGIC_BINARY
#undef MIXED

}  // namespace mshadow_op
}  // namespace op
}  // namespace mxnet

// The operators of sparse arrays have names of their own for arithmetic.
namespace mxnet {
namespace ndarray {
struct Plus : op::mshadow_op::plus {};
struct Minus : op::mshadow_op::minus {};
struct Mul : op::mshadow_op::mul {};
struct Div : op::mshadow_op::div {};
struct Mod : op::mshadow_op::mod {};
}  // namespace ndarray
}  // namespace mxnet
