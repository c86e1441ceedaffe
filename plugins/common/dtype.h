// Element types as the launchers take them. Nothing here knows of TensorRT or CUDA.
#pragma once

namespace onnxfuse
{
enum class Dtype : int
{
    kFloat32 = 0,
    kFloat16 = 1,
    kBfloat16 = 2
};

// The widest last axis of the row kernels: 512 threads that hold 32 float32 values each in registers.
constexpr int kMaxThreads = 512;
constexpr int kMaxValuesPerThread = 32;
constexpr int kMaxWidth = kMaxThreads * kMaxValuesPerThread;
} // namespace onnxfuse
