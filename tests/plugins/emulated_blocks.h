// What plugins/common/blocks.cuh has, on the host. Included in its place, after common/tensor.cuh. What is sent or copied in bulk comes some
// time later, in any order.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace onnxfuse
{
class Patience
{
public:
    explicit Patience(int*) {}
    void spend(int site)
    {
        if (++polls_ > 3'000'000)
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

struct Remote
{
    unsigned char* address;

    Remote operator+(int bytes) const
    {
        return {address + bytes};
    }
};
inline Remote remote(void* p, int rank)
{
    return {emulator::remote_shared(static_cast<unsigned char*>(p), rank)};
}

// A barrier in shared memory: 8 bytes, as on the GPU.
struct Barrier
{
    int32_t bytes;
    int8_t arrivals;
    int8_t left;
    int16_t phase;

    void settle()
    {
        if (left == 0 && bytes == 0)
        {
            left = arrivals;
            ++phase;
        }
    }
    void arrive()
    {
        --left;
        settle();
    }
    void take(int count)
    {
        bytes -= count;
        settle();
    }
};
inline void barrier_init(uint64_t* barrier, int arrivals = 1)
{
    *reinterpret_cast<Barrier*>(barrier) = {0, static_cast<int8_t>(arrivals), static_cast<int8_t>(arrivals), 0};
}
inline void barrier_init_done() {}
inline void barriers_ready() {}
inline void barrier_arrive(uint64_t* barrier)
{
    reinterpret_cast<Barrier*>(barrier)->arrive();
}
inline void barrier_expect(uint64_t* barrier, int bytes)
{
    auto& b = *reinterpret_cast<Barrier*>(barrier);
    b.bytes += bytes;
    b.arrive();
}
inline void barrier_wait(uint64_t* barrier, int parity, Patience& patience, int site)
{
    auto& b = *reinterpret_cast<Barrier*>(barrier);
    while ((b.phase & 1) == parity)
        patience.spend(site);
    patience.rest();
}
inline void barrier_wait(uint64_t* barrier, int parity)
{
    Patience patience(nullptr);
    barrier_wait(barrier, parity, patience, 0);
}
inline void barrier_wait_cluster(uint64_t* barrier, int parity, Patience& patience, int site)
{
    barrier_wait(barrier, parity, patience, site);
}
template <typename Value>
void send_later(Remote to, Remote barrier, Value value)
{
    emulator::later([=] {
        std::memcpy(to.address, &value, sizeof value);
        reinterpret_cast<Barrier*>(barrier.address)->take(sizeof value);
    });
}
inline void send(Remote to, Remote barrier, uint32_t a, uint32_t b)
{
    send_later(to, barrier, make_uint2(a, b));
}
inline void send(Remote to, Remote barrier, float4 v)
{
    send_later(to, barrier, v);
}
inline void before_async_reads() {}
inline void copy_later(void* to, void const* from, int bytes, void* barrier)
{
    if (bytes <= 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
    {
        std::fprintf(stderr, "a bulk copy of %d bytes that are no multiple of 16, or do not lie at one\n", bytes);
        std::abort();
    }
    emulator::later([=] {
        std::memcpy(to, from, static_cast<size_t>(bytes));
        static_cast<Barrier*>(barrier)->take(bytes);
    });
}
inline void copy_to_block(Remote to, void const* from, int bytes, Remote barrier)
{
    if (emulator::in_own_shared(to.address) || emulator::in_own_shared(barrier.address))
    {
        std::fprintf(stderr, "a bulk copy from a block to itself\n");
        std::abort();
    }
    copy_later(to.address, from, bytes, barrier.address);
}
inline void copy_bytes(void* to, void const* from, int bytes, uint64_t* barrier)
{
    copy_later(to, from, bytes, barrier);
}

inline void count_release(unsigned* count)
{
    ++*count;
}
inline void count_relaxed(unsigned* count)
{
    ++*count;
}
inline void fence_gpu() {}
inline unsigned count_and_ask(unsigned* count)
{
    return (*count)++;
}
inline void store_relaxed(unsigned* p, unsigned v)
{
    *p = v;
}
inline void wait_count(unsigned const* count, unsigned wanted, Patience& patience, int site)
{
    while (static_cast<int>(*count - wanted) < 0)
        patience.spend(site);
    patience.rest();
}
} // namespace onnxfuse
