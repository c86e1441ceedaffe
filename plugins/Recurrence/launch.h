// C launcher of LSTM and GRU layers and stacks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/export.h"

#define ONNXFUSE_MAX_LAYERS 8

extern "C"
{
// How a recurrence is computed. All give the same result but for rounding.
enum OnnxfuseRecurrenceVariant
{
    kRecurrenceAutomatic = 0,
    kRecurrenceSteps = 1,       // a launch a step: anything, anywhere
    kRecurrenceGrid = 2,        // one cooperative launch, a grid barrier a step: float32, and cell 2 of any type
    kRecurrenceIndependent = 3, // half types, hidden up to 128: a block has all units of a few batch rows, weights in registers
    kRecurrenceCluster = 4,     // half types, hidden up to 512, compute capability 9.0: units shared out over a cluster
    kRecurrenceResident = 5     // half types, hidden up to 1024: weights in registers, one cooperative launch, a grid barrier a step
};

// One layer. weights: [directions, gates * hidden, width] and [directions, gates * hidden, hidden]; bias: [directions, 2 * gates * hidden];
// rows in ONNX's order (i o f c, z r h). h0, c0, h_last, c_last: element [direction][row][unit] at
// direction * state_direction + row * state_row + unit, with nothing between the rows. All but the weights may be null.
struct OnnxfuseRecurrentLayer
{
    void const* input_weights;
    void const* weights;
    void const* bias;
    void const* h0;
    void const* c0;
    void* h_last;
    void* c_last;
};

struct OnnxfuseRecurrence
{
    int32_t dtype;       // onnxfuse::Dtype of all tensors but `lengths`
    int32_t cell;        // 0 LSTM, 1 GRU with linear_before_reset, 2 GRU without
    int32_t directions;  // 1 or 2
    int32_t reversed;    // bit d: direction d runs backwards
    int32_t layers;      // 1 to ONNXFUSE_MAX_LAYERS; each takes the output of the one before, its directions side by side
    int32_t steps, batch, width, hidden; // width: of x; hidden: a multiple of 8
    float clip;          // bounds the gates' sums; 0: none
    void const* x;       // element [t][row][i] at t * x_step + row * x_row + i
    int64_t x_step, x_row;
    int32_t const* lengths; // [batch], in device memory; null: all steps
    void* y;             // element [t][direction][row][unit] at t * y_step + direction * y_direction + row * y_row + unit; may be null
    int64_t y_step, y_direction, y_row;
    int64_t state_direction, state_row;
    OnnxfuseRecurrentLayer layer[ONNXFUSE_MAX_LAYERS];
    // How; 0 chooses.
    int32_t variant;     // OnnxfuseRecurrenceVariant
    int32_t rows;        // batch rows of a block: independent 2 or 4 (1 or 8 with hidden up to 64), cluster 1 or 8
    int32_t cluster;     // blocks of a cluster: 8 or 16
    int32_t wavefront;   // 0: where it fits; 1: layers one after the other
    int32_t serial;      // 1: no kernel starts before the one before it has ended; 2: a wavefront may start early, and is not checked to fit
    int32_t* fault;      // host memory that a kernel that waits in vain writes to; may be null
};

// Bytes of workspace that onnxfuse_launch_recurrence() needs for this problem on the current device; 0 where it is refused.
ONNXFUSE_EXPORT size_t onnxfuse_recurrence_workspace(OnnxfuseRecurrence const* problem);

// The most that it needs for this problem and for any with fewer steps or batch rows.
ONNXFUSE_EXPORT size_t onnxfuse_recurrence_workspace_up_to(OnnxfuseRecurrence const* problem);

// The variant that 0 stands for here, or the one given; negative: minus a cudaError_t.
ONNXFUSE_EXPORT int onnxfuse_recurrence_variant(OnnxfuseRecurrence const* problem);

// Computes it. Returns a cudaError_t: cudaErrorInvalidValue for sizes or pointers that make no sense, cudaErrorNotSupported where the
// variant does not take them, cudaErrorMisalignedAddress for pointers or strides that are no multiples of 16 bytes (x excepted),
// cudaErrorCooperativeLaunchTooLarge where blocks that wait for each other would not be resident at once, cudaErrorMemoryAllocation
// for too small a workspace. Asynchronous on `stream`; safe to capture in a graph; keeps nothing between calls.
ONNXFUSE_EXPORT int onnxfuse_launch_recurrence(OnnxfuseRecurrence const* problem, void* workspace, size_t bytes, void* stream);
}
