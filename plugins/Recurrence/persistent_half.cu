#include "persistent_table.cuh"

template onnxfuse::PersistentKernel<__half> onnxfuse::find_persistent<__half>(PersistentShape const&, bool);
template onnxfuse::ResidentKernel<__half> onnxfuse::find_resident<__half>(int, int, bool);
