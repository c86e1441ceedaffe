#include "persistent_table.cuh"

template onnxfuse::PersistentKernel<__nv_bfloat16> onnxfuse::find_persistent<__nv_bfloat16>(PersistentShape const&, bool);
template onnxfuse::ResidentKernel<__nv_bfloat16> onnxfuse::find_resident<__nv_bfloat16>(int, int, bool);
