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
#include "persistent_table.cuh"

template onnxfuse::PersistentKernel<__half> onnxfuse::find_persistent<__half>(PersistentShape const&, bool);
template onnxfuse::ResidentKernel<__half> onnxfuse::find_resident<__half>(int, int, bool);
