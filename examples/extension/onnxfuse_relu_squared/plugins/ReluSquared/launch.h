#pragma once

#include <cstdint>

#include "common/export.h"

// output = relu(input)^2 of `count` elements in device memory; NaN stays NaN. dtype: onnxfuse::Dtype. Returns a cudaError_t. The
// product is of float32, rounded once when stored. Asynchronous on `stream` (a cudaStream_t).
extern "C" ONNXFUSE_EXPORT int onnxfuse_launch_relu_squared(
    int dtype, void const* input, void* output, int64_t count, void* stream);
