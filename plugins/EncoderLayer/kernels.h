// The kernels, each compiled in a file of its own.
#pragma once

#include "arguments.h"

namespace onnxfuse::encoder
{
template <typename T>
using Encode = void (*)(Args<T> const);

template <typename T>
Encode<T> encode_kernel();
template <>
Encode<__half> encode_kernel<__half>();
template <>
Encode<__nv_bfloat16> encode_kernel<__nv_bfloat16>();
} // namespace onnxfuse::encoder
