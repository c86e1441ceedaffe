// The way from the launcher to the kernel for Hopper.
#pragma once

#include <cuda_runtime_api.h>

#include "launch.h"

namespace onnxfuse
{
// Whether this GPU has what the kernel needs: compute capability 9.0.
cudaError_t hopper_supported();
// Tiles of 64 x 64; p.split: 1, 2, 4 or 8.
cudaError_t launch_linear_group(OnnxfuseLinear const& p, cudaStream_t stream);
// p.tile_columns: 128 or 256.
cudaError_t launch_linear_hopper(OnnxfuseLinear const& p, cudaStream_t stream);
} // namespace onnxfuse
