// What plugins/common/tensor.cuh has, on the host. Included in its place, after common/vector.cuh.
#pragma once

#include <vector>

#define ONNXFUSE_SHARED(name) unsigned char* const name = emulator::dynamic_shared()

namespace onnxfuse
{
template <typename T>
float value_of(uint16_t bits)
{
    static std::vector<float> const table = [] {
        std::vector<float> t(65536);
        for (int i = 0; i < 65536; ++i)
            t[i] = widen(bits_as<T>(static_cast<uint16_t>(i)));
        return t;
    }();
    return table[bits];
}
// Element `index` of a register of two.
template <typename T>
float half_in(uint32_t word, int index)
{
    return value_of<T>(static_cast<uint16_t>(word >> 16 * index));
}

template <typename T>
void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, T)
{
    emulator::Gift const* const all = emulator::gather({{a0, a1, a2, a3, b0, b1}});
    int const g = emulator::lane() / 4, q = emulator::lane() % 4;
    for (int i = 0; i < 4; ++i)
    {
        int const row = g + i / 2 * 8, column = 2 * q + i % 2;
        for (int k = 0; k < 16; ++k)
        {
            uint32_t const x = all[row % 8 * 4 + k % 8 / 2].words[row / 8 + k / 8 * 2];
            uint32_t const y = all[column * 4 + k % 8 / 2].words[4 + k / 8];
            c[i] += half_in<T>(x, k % 2) * half_in<T>(y, k % 2);
        }
    }
    emulator::wait_for_warp();
}

inline float exp2_approximate(float x)
{
    return std::exp2(x);
}

// Every lane's address, then the halves that this lane is due.
template <int kMatrices>
void emulated_matrices(uint32_t (&r)[kMatrices], void const* row, bool transposed)
{
    auto const address = reinterpret_cast<uintptr_t>(row);
    emulator::Gift const* const all = emulator::gather({{static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32)}});
    int const g = emulator::lane() / 4, q = emulator::lane() % 4;
    for (int m = 0; m < kMatrices; ++m)
    {
        auto const at = [&](int i, int j) {
            emulator::Gift const& gift = all[8 * m + i];
            uintptr_t const base = gift.words[0] | static_cast<uintptr_t>(gift.words[1]) << 32;
            if (base % 16 != 0)
                std::abort(); // as the GPU: a misaligned row is an error
            return reinterpret_cast<uint16_t const*>(base)[j];
        };
        uint32_t const low = transposed ? at(2 * q, g) : at(g, 2 * q);
        uint32_t const high = transposed ? at(2 * q + 1, g) : at(g, 2 * q + 1);
        r[m] = low | high << 16;
    }
    emulator::wait_for_warp();
}
inline void load_matrices(uint32_t (&r)[4], void const* row)
{
    emulated_matrices(r, row, false);
}
inline void load_matrices(uint32_t (&r)[2], void const* row)
{
    emulated_matrices(r, row, false);
}
inline void load_matrices_transposed(uint32_t (&r)[4], void const* row)
{
    emulated_matrices(r, row, true);
}

inline void copy_16(void* to, void const* from, bool there)
{
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
        std::abort();
    emulator::copy(to, from, there);
}
inline void copy_16(void* to, void const* from)
{
    copy_16(to, from, true);
}
inline void end_of_copies()
{
    emulator::end_group();
}
template <int kLeft>
void wait_for_copies()
{
    emulator::wait_for_copies(kLeft);
}

// Of 128 threads.
inline void group_sync()
{
    emulator::wait_for_group();
}
inline void next_may_start() {}
inline void wait_for_kernel_before() {}

inline int cluster_rank()
{
    return static_cast<int>(blockIdx.x) % emulator::cluster_size();
}
inline int cluster_of_grid()
{
    return static_cast<int>(blockIdx.x) / emulator::cluster_size();
}

// Both halves at once: the emulator's barrier. Nothing may rely on what happens between.
inline void cluster_arrive() {}
inline void cluster_wait()
{
    emulator::wait_for_cluster();
}
template <typename T>
T* emulated_remote(T const* p, int rank)
{
    auto* const here = reinterpret_cast<unsigned char*>(const_cast<T*>(p));
    return reinterpret_cast<T*>(emulator::remote_shared(here, rank));
}
inline void remote_store(float2* p, int rank, float2 value)
{
    *emulated_remote(p, rank) = value;
}
using RemotePlace = unsigned char*;
inline RemotePlace remote_place(void const* p, int rank)
{
    return emulated_remote(static_cast<unsigned char const*>(p), rank);
}
inline void remote_put(RemotePlace place, int bytes, float2 value)
{
    *reinterpret_cast<float2*>(place + bytes) = value;
}
inline float4 remote_load(float4 const* p, int rank)
{
    return *emulated_remote(p, rank);
}
inline float remote_load(float const* p, int rank)
{
    return *emulated_remote(p, rank);
}
} // namespace onnxfuse
