// Packs one layer on the GPU, for tests: onnxfuse/engine/encoder.py does it for products.
#pragma once
#include "../plugins/common/export.h"
#include <cstddef>
#include <cstdint>
extern "C"
{
struct PackLinear { void const* weights; int64_t k_stride, n_stride; void const* bias; }; // element (k, n) at k * k_stride + n * n_stride
struct PackNorm { void const *gamma, *beta; };
struct PackLayer { PackLinear query, key, value, projection, inner, outer; PackNorm before_qkv, before_inner; };
// bytes[0], bytes[1]: of the weights and vectors of a layer
ONNXFUSE_EXPORT void gt_packed(int width, int inner, int64_t* bytes);
ONNXFUSE_EXPORT int gt_pack(int dtype, int width, int inner, int pre_norm, PackLayer const* layer, void* weights, void* vectors, void* stream);
}
