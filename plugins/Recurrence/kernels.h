// The kernels by their run-time choices: one compilation unit for each type, and one for what has all types.
#pragma once

#include <cuda_runtime_api.h>

#include "persistent.cuh"
#include "projection.cuh"
#include "resident.cuh"
#include "steps.cuh"

namespace onnxfuse
{
struct PersistentShape
{
    int slices;  // of 32 hidden units
    int tiles;
    int rows;
    int cluster;

    bool operator==(PersistentShape const& other) const
    {
        return slices == other.slices && tiles == other.tiles && rows == other.rows && cluster == other.cluster;
    }
};

template <typename T>
struct PersistentKernel
{
    PersistentShape shape;
    void (*kernel)(RecurrentArgs<T>); // null: there is none
    int shared_bytes;
};

// The kernel of that shape.
template <typename T>
PersistentKernel<T> find_persistent(PersistentShape const& shape, bool gru);

// The kernel whose blocks have 4 * tiles units and whose warps have 32 * slices of k; null: there is none.
template <typename T>
using ResidentKernel = void (*)(StepArgs<T>, int);
template <typename T>
ResidentKernel<T> find_resident(int tiles, int slices, bool gru);
} // namespace onnxfuse
