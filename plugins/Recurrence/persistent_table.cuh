// Which persistent kernels there are.
#pragma once

#include "kernels.h"

// slices, tiles, rows, cluster
#define ONNXFUSE_SHAPES                                                                         \
    ONNXFUSE_SHAPE(2, 1, 1, 1)                                                                  \
    ONNXFUSE_SHAPE(2, 1, 8, 1)                                                                  \
    ONNXFUSE_SHAPE(4, 2, 2, 1)                                                                  \
    ONNXFUSE_SHAPE(4, 2, 4, 1)                                                                  \
    ONNXFUSE_SHAPE(4, 1, 1, 8)                                                                  \
    ONNXFUSE_SHAPE(8, 1, 1, 8)                                                                  \
    ONNXFUSE_SHAPE(8, 1, 8, 8)                                                                  \
    ONNXFUSE_SHAPE(8, 1, 1, 16)                                                                 \
    ONNXFUSE_SHAPE(16, 1, 1, 16)                                                                \
    ONNXFUSE_SHAPE(16, 1, 8, 16)

namespace onnxfuse
{
template <typename T, Cell kCell, int kSlices, int kTiles, int kRows, int kCluster>
PersistentKernel<T> persistent_kernel()
{
    return {{kSlices, kTiles, kRows, kCluster}, persistent<T, kCell, kSlices, kTiles, kRows, kCluster>,
        Persistent<T, kCell, kSlices, kTiles, kRows, kCluster>::kSharedBytes};
}

template <typename T, Cell kCell>
PersistentKernel<T> pick_persistent(PersistentShape const& shape)
{
#define ONNXFUSE_SHAPE(slices, tiles, rows, cluster)                    \
    if (shape == PersistentShape{slices, tiles, rows, cluster})         \
        return persistent_kernel<T, kCell, slices, tiles, rows, cluster>();
    ONNXFUSE_SHAPES
#undef ONNXFUSE_SHAPE
    return {shape, nullptr, 0};
}

template <typename T>
PersistentKernel<T> find_persistent(PersistentShape const& shape, bool gru)
{
    return gru ? pick_persistent<T, Cell::kGru>(shape) : pick_persistent<T, Cell::kLstm>(shape);
}

template <typename T, Cell kCell>
ResidentKernel<T> pick_resident(int tiles, int slices)
{
#define ONNXFUSE_SHAPE(of_tiles, of_slices)          \
    if (tiles == of_tiles && slices == of_slices)    \
        return resident<T, kCell, of_tiles, of_slices>;
    ONNXFUSE_SHAPE(1, 1)
    ONNXFUSE_SHAPE(1, 2)
    ONNXFUSE_SHAPE(2, 1)
    ONNXFUSE_SHAPE(2, 2)
    ONNXFUSE_SHAPE(2, 4)
    ONNXFUSE_SHAPE(4, 1)
    ONNXFUSE_SHAPE(4, 2)
    ONNXFUSE_SHAPE(4, 4)
#undef ONNXFUSE_SHAPE
    return nullptr;
}

template <typename T>
ResidentKernel<T> find_resident(int tiles, int slices, bool gru)
{
    return gru ? pick_resident<T, Cell::kGru>(tiles, slices) : pick_resident<T, Cell::kLstm>(tiles, slices);
}
} // namespace onnxfuse
