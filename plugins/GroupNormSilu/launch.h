// C launcher of GroupNorm + scale and shift, with SiLU or without.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/export.h"

extern "C"
{
// output = silu((normalised * gamma[c] + beta[c]) * film_scale[n, c] + film_shift[n, c]), or that without silu; normalised over a group's
// channels and all pixels. All tensors of one element type, in device memory, at multiples of 16 bytes.
struct OnnxfuseGroupNorm
{
    int32_t dtype;          // onnxfuse::Dtype
    int32_t images;
    int32_t channels;
    int32_t groups;
    int32_t pixels;
    int32_t channels_last;  // 0: [n, c, pixels]; 1: [n, pixels, c]
    int32_t silu;           // 1, or 0: without
    float epsilon;
    void const* input;
    void const* gamma;      // [channels], or null: ones
    void const* beta;       // [channels], or null: zeros
    void const* film_scale; // [images, channels], or null
    void const* film_shift; // [images, channels], or null
    void* output;
    // The tactic; zeros: chosen by size.
    int32_t threads;        // of a block
    int32_t per_thread;     // vectors that a thread holds: 2, or 8 as two kernels always do
    int32_t split;          // blocks that share a group: in a cluster up to 16, or in two kernels (then at least as many as hold a group)
    int32_t bulk;           // 1: a block's part in shared memory (compute capability 9.0, channels first, pixels whole vectors); 2: 4 vectors
                            // of each thread in registers, the rest in shared memory, so that two blocks with much are on a multiprocessor
    int32_t two_kernels;    // 1: statistics by one kernel, the output by another
    int32_t early;          // 1: may start before the kernel before it in the stream has ended; only weights are read until then
};

// cudaSuccess where the launcher takes the problem with its tactic on this GPU; pointers are not looked at.
ONNXFUSE_EXPORT int onnxfuse_group_norm_supported(OnnxfuseGroupNorm const* problem);
// Bytes of workspace for any tactic of that many groups of that many images.
ONNXFUSE_EXPORT size_t onnxfuse_group_norm_workspace_up_to(int64_t images, int64_t groups);
// Bytes of workspace, at a multiple of 16; 0 for one kernel.
ONNXFUSE_EXPORT size_t onnxfuse_group_norm_workspace(OnnxfuseGroupNorm const* problem);
// Returns a cudaError_t: cudaErrorInvalidValue for what is not supported (sizes, tactic, a missing pointer), cudaErrorMisalignedAddress
// for pointers that are no multiples of 16 bytes. Asynchronous on `stream`; safe to capture in a graph.
ONNXFUSE_EXPORT int onnxfuse_launch_group_norm(OnnxfuseGroupNorm const* problem, void* workspace, void* stream);
}
