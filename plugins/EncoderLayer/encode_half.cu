#include "encoder.cuh"
#include "kernels.h"

namespace onnxfuse::encoder
{
template <>
Encode<__half> encode_kernel<__half>()
{
    return encode<__half>;
}
} // namespace onnxfuse::encoder
