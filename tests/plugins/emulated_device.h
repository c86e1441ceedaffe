// What plugins/Recurrence/device.cuh has, on the host. Included in its place, after common/vector.cuh.
#pragma once

#include <cstdio>
#include <cstdlib>

#define ONNXFUSE_DYNAMIC_SHARED(name) unsigned char* const name = emulator::dynamic_shared()

namespace onnxfuse
{
class Patience
{
public:
    explicit Patience(int*) {}
    void spend(int site)
    {
        if (++polls_ > 30'000)
        {
            std::fprintf(stderr, "waits in vain at site %d, block (%u, %u), thread %u\n", site, blockIdx.x, blockIdx.y, threadIdx.x);
            std::abort();
        }
        emulator::yield();
    }
    void rest()
    {
        polls_ = 0;
    }

private:
    int polls_ = 0;
};

// Element `index` of a register of two.
template <typename T>
float half_of(uint32_t word, int index)
{
    return widen(bits_as<T>(static_cast<uint16_t>(word >> 16 * index)));
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
            uint32_t const a = all[row % 8 * 4 + k % 8 / 2].words[row / 8 + k / 8 * 2];
            uint32_t const b = all[column * 4 + k % 8 / 2].words[4 + k / 8];
            c[i] += half_of<T>(a, k % 2) * half_of<T>(b, k % 2);
        }
    }
    emulator::wait_for_warp();
}

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

struct Remote
{
    unsigned char* address;

    Remote operator+(int bytes) const
    {
        return {address + bytes};
    }
};

inline void cluster_sync()
{
    emulator::wait_for_cluster();
}
inline Remote remote(void* p, int rank)
{
    return {emulator::remote_shared(static_cast<unsigned char*>(p), rank)};
}

// A barrier in shared memory: 8 bytes, as on the GPU.
struct Barrier
{
    int32_t bytes;
    int16_t arrivals;
    int16_t phase;

    void settle()
    {
        if (arrivals == 0 && bytes == 0)
        {
            arrivals = 1;
            ++phase;
        }
    }
};
inline void barrier_init(uint64_t* barrier)
{
    *reinterpret_cast<Barrier*>(barrier) = {0, 1, 0};
}
inline void barrier_init_done() {}
inline void barrier_expect(uint64_t* barrier, int bytes)
{
    auto& b = *reinterpret_cast<Barrier*>(barrier);
    b.bytes += bytes;
    --b.arrivals;
    b.settle();
}
inline void barrier_wait(uint64_t* barrier, int parity, Patience& patience, int site)
{
    auto& b = *reinterpret_cast<Barrier*>(barrier);
    while ((b.phase & 1) == parity)
        patience.spend(site);
    patience.rest();
}
inline void send(Remote to, Remote barrier, uint32_t a, uint32_t b)
{
    emulator::later([=] {
        uint32_t const words[2] = {a, b};
        std::memcpy(to.address, words, sizeof words);
        auto& at = *reinterpret_cast<Barrier*>(barrier.address);
        at.bytes -= static_cast<int32_t>(sizeof words);
        at.settle();
    });
}
inline void before_copies_read() {}
inline void copy_to_block(Remote to, void const* from, int bytes, Remote barrier)
{
    if (emulator::in_own_shared(to.address) || emulator::in_own_shared(barrier.address) || bytes <= 0 || bytes % 16 != 0)
    {
        std::fprintf(stderr, "a bulk copy of %d bytes from a block to itself, or of no multiple of 16\n", bytes);
        std::abort();
    }
    emulator::later([=] {
        std::memcpy(to.address, from, static_cast<size_t>(bytes));
        auto& at = *reinterpret_cast<Barrier*>(barrier.address);
        at.bytes -= bytes;
        at.settle();
    });
}
inline void let_next_start() {}
inline void wait_for_previous() {}

constexpr uint32_t kReady = 1;

inline uint64_t flagged_load(uint64_t const* p)
{
    return *p;
}
inline void flagged_store(uint64_t* p, uint32_t payload)
{
    *p = uint64_t{kReady} << 32 | payload;
}
inline void grid_barrier(unsigned* count, unsigned round, Patience& patience, int site)
{
    __syncthreads();
    if (threadIdx.x == 0)
    {
        ++*count;
        while (*count < round * gridDim.x)
            patience.spend(site);
        patience.rest();
    }
    __syncthreads();
}
inline float4 load_fresh(float const* p)
{
    return *reinterpret_cast<float4 const*>(p);
}
inline void copy_async(void* to, void const* from, bool there)
{
    if (there)
        std::memcpy(to, from, 16);
    else
        std::memset(to, 0, 16);
}
inline void copy_commit() {}
template <int kLeft>
void copy_wait()
{
}
} // namespace onnxfuse
