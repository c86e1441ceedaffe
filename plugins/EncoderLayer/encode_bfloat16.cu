#include "encoder.cuh"
#include "kernels.h"

namespace onnxfuse::encoder
{
template <>
Encode<__nv_bfloat16> encode_kernel<__nv_bfloat16>()
{
    return encode<__nv_bfloat16>;
}
} // namespace onnxfuse::encoder
