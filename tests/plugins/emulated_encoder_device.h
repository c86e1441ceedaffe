// What plugins/EncoderLayer/device.cuh has, on the host. Copies in the background happen as late as they may: when their group is waited
// for, or by chance while somebody waits; products of a warpgroup at once or when they are waited for, by turns.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <unordered_map>
#include <vector>

#define ONNXFUSE_DYNAMIC_SHARED(name) unsigned char* const name = emulator::dynamic_shared()

namespace onnxfuse::encoder
{
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
    void take(int count)
    {
        bytes -= count;
        settle();
    }
};

struct Bulk
{
    void* to;
    void const* from;
    int bytes;
    uint64_t* barrier;
};
inline std::deque<Bulk>& bulks()
{
    static std::deque<Bulk> waiting;
    return waiting;
}
inline bool perhaps()
{
    static std::minstd_rand chance(7);
    return chance() % 3 == 0;
}
inline void move_bulks()
{
    auto& waiting = bulks();
    while (!waiting.empty() && perhaps())
    {
        Bulk const b = waiting.front();
        waiting.pop_front();
        std::memcpy(b.to, b.from, static_cast<size_t>(b.bytes));
        reinterpret_cast<Barrier*>(b.barrier)->take(b.bytes);
    }
}

class Patience
{
public:
    explicit Patience(int*) {}
    void spend(int site)
    {
        if (++polls_ > 3'000'000)
        {
            std::fprintf(stderr, "waits in vain at site %d, block %u, thread %u\n", site, blockIdx.x, threadIdx.x);
            std::abort();
        }
        move_bulks();
        emulator::yield();
    }
    void rest()
    {
        polls_ = 0;
    }

private:
    int polls_ = 0;
};

inline long long clock_now()
{
    return 0;
}
inline float exp2_approximate(float x)
{
    return std::exp2(x);
}
inline float reciprocal_approximate(float x)
{
    return 1.0f / x;
}

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
inline void cluster_sync()
{
    emulator::wait_for_cluster();
}
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
inline void barrier_wait_cluster(uint64_t* barrier, int parity, Patience& patience, int site)
{
    barrier_wait(barrier, parity, patience, site);
}
inline void send(Remote to, Remote barrier, float4 v)
{
    std::memcpy(to.address, &v, sizeof v);
    reinterpret_cast<Barrier*>(barrier.address)->take(sizeof v);
}
inline void bulk_load(void* to, void const* from, int bytes, uint64_t* barrier)
{
    if (bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16)
    {
        std::fprintf(stderr, "bulk copy of %d bytes not aligned\n", bytes);
        std::abort();
    }
    bulks().push_back({to, from, bytes, barrier});
}

// --- per thread --------------------------------------------------------------------------------------------------------

struct Piece
{
    void* to;
    void const* from;
    bool there;
};
struct Operand
{
    unsigned char const* p;
    int step, rows;

    Operand(void const* at, int step_bytes, int rows_bytes)
        : p(static_cast<unsigned char const*>(at))
        , step(step_bytes)
        , rows(rows_bytes)
    {
    }
    void advance(int bytes)
    {
        p += bytes;
    }
};
struct Waiting
{
    float (*c)[4];
    Operand a, b;
    int tiles;
    float (*value)(uint16_t);
};
struct ThreadState
{
    std::vector<Piece> open;
    std::deque<std::vector<Piece>> groups;
    std::vector<Waiting> open_products;
    std::deque<std::vector<Waiting>> products;
};
inline ThreadState& mine()
{
    static std::unordered_map<uint64_t, ThreadState> states;
    return states[uint64_t{blockIdx.x} << 16 | threadIdx.x];
}
inline void copy_async(void* to, void const* from, bool there)
{
    mine().open.push_back({to, from, there});
}
inline void copy_async(void* to, void const* from)
{
    copy_async(to, from, true);
}
inline void copy_commit()
{
    auto& m = mine();
    m.groups.push_back(std::move(m.open));
    m.open.clear();
}
template <int kLeft>
void copy_wait()
{
    auto& groups = mine().groups;
    while (static_cast<int>(groups.size()) > kLeft)
    {
        for (Piece const& piece : groups.front())
        {
            if (piece.there)
                std::memcpy(piece.to, piece.from, 16);
            else
                std::memset(piece.to, 0, 16);
        }
        groups.pop_front();
    }
}
inline void before_async_reads() {}

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
inline void do_product(Waiting const& w)
{
    int const warp = static_cast<int>(threadIdx.x) / 32 % 4, g = emulator::lane() / 4, q = emulator::lane() % 4;
    float a[2][16];
    for (int h = 0; h < 2; ++h)
    {
        for (int k = 0; k < 16; ++k)
        {
            int const row = warp * 16 + g + 8 * h;
            a[h][k] = w.value(*reinterpret_cast<uint16_t const*>(w.a.p + k / 8 * w.a.step + row / 8 * w.a.rows + row % 8 * 16 + k % 8 * 2));
        }
    }
    for (int j = 0; j < w.tiles; ++j)
    {
        for (int e = 0; e < 2; ++e)
        {
            int const n = 8 * j + 2 * q + e;
            for (int k = 0; k < 16; ++k)
            {
                float const b
                    = w.value(*reinterpret_cast<uint16_t const*>(w.b.p + k / 8 * w.b.step + n / 8 * w.b.rows + n % 8 * 16 + k % 8 * 2));
                w.c[j][e] += a[0][k] * b;
                w.c[j][2 + e] += a[1][k] * b;
            }
        }
    }
}
inline void product_fence() {}
inline void product_commit()
{
    auto& m = mine();
    m.products.push_back(std::move(m.open_products));
    m.open_products.clear();
}
template <int kLeft>
void product_wait()
{
    auto& products = mine().products;
    while (static_cast<int>(products.size()) > kLeft)
    {
        for (Waiting const& w : products.front())
            do_product(w);
        products.pop_front();
    }
}
template <typename T, int kTiles>
struct Product
{
    static void add(float (*c)[4], Operand const& a, Operand const& b)
    {
        Waiting const w{c, a, b, kTiles, value_of<T>};
        static unsigned turn = 0;
        if (mine().products.empty() && mine().open_products.empty() && ++turn % 5 == 0)
            do_product(w);
        else
            mine().open_products.push_back(w);
    }
};

template <typename T>
void mma(float (&c)[4], uint4 const& a, uint32_t b0, uint32_t b1, T)
{
    emulator::Gift const* const all = emulator::gather({{a.x, a.y, a.z, a.w, b0, b1}});
    int const g = emulator::lane() / 4, q = emulator::lane() % 4;
    for (int i = 0; i < 4; ++i)
    {
        int const row = g + i / 2 * 8, column = 2 * q + i % 2;
        for (int k = 0; k < 16; ++k)
        {
            uint32_t const x = all[row % 8 * 4 + k % 8 / 2].words[row / 8 + k / 8 * 2];
            uint32_t const y = all[column * 4 + k % 8 / 2].words[4 + k / 8];
            c[i] += value_of<T>(static_cast<uint16_t>(x >> 16 * (k % 2))) * value_of<T>(static_cast<uint16_t>(y >> 16 * (k % 2)));
        }
    }
    emulator::wait_for_warp();
}
inline uint32_t transpose(uint32_t word)
{
    emulator::Gift const* const all = emulator::gather({{word}});
    int const g = emulator::lane() / 4, q = emulator::lane() % 4;
    uint32_t to = 0;
    for (int e = 0; e < 2; ++e)
    {
        // Element [g][2q + e] of the transpose is [2q + e][g].
        uint32_t const from = all[(2 * q + e) * 4 + g / 2].words[0];
        to |= (from >> 16 * (g % 2) & 0xffff) << 16 * e;
    }
    emulator::wait_for_warp();
    return to;
}

template <typename V>
V load_fresh(V const* p)
{
    return *p;
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
} // namespace onnxfuse::encoder
