// Factors between logarithms: exp(x) = exp2(kLog2e x), and log(x) = kLn2 log2(x).
#pragma once

namespace ejkernel {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

}  // namespace ejkernel
