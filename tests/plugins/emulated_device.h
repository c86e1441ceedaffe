// What plugins/Recurrence/device.cuh has, on the host. Included in its place, after common/blocks.cuh.
#pragma once

namespace onnxfuse
{
inline float tanh_approximate(float x)
{
    return std::tanh(x);
}

inline float smaller(float a, float b)
{
    return b < a ? b : a;
}
inline float larger(float a, float b)
{
    return b > a ? b : a;
}

constexpr uint32_t kReady = 1;

inline uint64_t flagged_load(uint64_t const* p)
{
    return *p;
}
inline void flagged_store(uint64_t* p, uint32_t payload)
{
    *p = uint64_t{kReady} << 32 | payload;
}
} // namespace onnxfuse
