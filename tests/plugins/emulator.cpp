#include "emulator.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include <csetjmp>
#include <ucontext.h>

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator
{
namespace
{
// Threads that wait for each other.
struct Group
{
    int size = 0;
    int arrived = 0;
    int generation = 0;
    float slots[32] = {};
    Gift gifts[32] = {};

    void release_if_all()
    {
        if (arrived == size)
        {
            arrived = 0;
            ++generation;
        }
    }
    void leave()
    {
        --size;
        if (size > 0)
            release_if_all();
    }
};

struct Block
{
    dim3 index;
    Group all;
    Group groups[8]; // of 128 threads
    Group* cluster = nullptr;
    std::vector<unsigned char> shared;
};

struct Copy
{
    void* to;
    void const* from; // null: zeros
    int group;
};

struct Thread
{
    jmp_buf at; // where it goes on
    std::unique_ptr<char[]> stack;
    dim3 index;
    int lane = 0;
    Block* block = nullptr;
    Group* warp = nullptr;
    std::vector<Copy> copies;
    int groups = 0;
    bool started = false;
    bool done = false;
};

constexpr size_t kStack = 64 * 1024;
jmp_buf scheduler;
std::vector<Thread> threads;
std::vector<Group> warps;
std::vector<Group> clusters;
std::vector<Block> blocks;
std::vector<std::function<void()>> pending;
Thread* current = nullptr;
std::function<void()> const* body = nullptr;
int blocks_of_cluster = 1;

void wait(Group& group)
{
    int const generation = group.generation;
    ++group.arrived;
    group.release_if_all();
    while (group.generation == generation)
        yield();
}

void enter()
{
    (*body)();
    current->done = true;
    for (Group* group : {current->warp, &current->block->all, current->block->cluster})
        group->leave();
    yield();
}
} // namespace

// Without the signal mask, which would cost two system calls each time.
int setting(char const* name, int otherwise)
{
    char const* const text = std::getenv(name);
    return text ? std::atoi(text) : otherwise;
}

void yield()
{
    if (_setjmp(current->at) == 0)
        _longjmp(scheduler, 1);
}

void wait_for_block()
{
    wait(current->block->all);
}

void wait_for_group()
{
    Group& group = current->block->groups[threadIdx.x / 128];
    group.size = 128;
    wait(group);
}

void wait_for_warp()
{
    wait(*current->warp);
}

void wait_for_cluster()
{
    wait(*current->block->cluster);
}

int lane()
{
    return current->lane;
}

float exchange(float value, int lane_mask)
{
    Group& warp = *current->warp;
    warp.slots[current->lane] = value;
    wait(warp);
    float const result = warp.slots[current->lane ^ lane_mask];
    wait(warp);
    return result;
}

Gift const* gather(Gift const& mine)
{
    Group& warp = *current->warp;
    warp.gifts[current->lane] = mine;
    wait(warp);
    return warp.gifts;
}

unsigned char* dynamic_shared()
{
    auto const start = reinterpret_cast<uintptr_t>(current->block->shared.data());
    return reinterpret_cast<unsigned char*>((start + 1023) / 1024 * 1024);
}

int cluster_size()
{
    return blocks_of_cluster;
}

unsigned char* remote_shared(unsigned char* here, int rank)
{
    Block* const mine = current->block;
    Block* const first = mine - (mine - blocks.data()) % blocks_of_cluster;
    Block* const other = first + rank;
    auto const start = reinterpret_cast<uintptr_t>(other->shared.data());
    return reinterpret_cast<unsigned char*>((start + 1023) / 1024 * 1024) + (here - dynamic_shared());
}

bool in_own_shared(unsigned char const* p)
{
    std::vector<unsigned char> const& own = current->block->shared;
    return p >= own.data() && p < own.data() + own.size();
}

void later(std::function<void()> act)
{
    pending.push_back(std::move(act));
}

void copy(void* to, void const* from, bool there)
{
    std::memset(to, 0xff, 16);
    current->copies.push_back({to, there ? from : nullptr, current->groups});
}

void end_group()
{
    ++current->groups;
}

void wait_for_copies(int left)
{
    std::vector<Copy>& copies = current->copies;
    size_t done = 0;
    for (; done < copies.size() && copies[done].group < current->groups - left; ++done)
    {
        if (copies[done].from)
            std::memcpy(copies[done].to, copies[done].from, 16);
        else
            std::memset(copies[done].to, 0, 16);
    }
    copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(done));
}

// Runs the current thread until it yields.
static void go_on()
{
    if (_setjmp(scheduler) != 0)
        return;
    if (current->started)
        _longjmp(current->at, 1);
    current->started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = current->stack.get();
    context.uc_stack.ss_size = kStack;
    makecontext(&context, enter, 0);
    setcontext(&context);
}

// Runs `blocks` to their end. In every round the threads of each warp take their turn; some are left out by chance, so that none can count
// on another's pace.
static void run_blocks()
{
    int const each = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
    int const count = each * static_cast<int>(blocks.size());
    int const warps_each = (each + 31) / 32;
    if (static_cast<int>(threads.size()) < count)
        threads.resize(count);
    warps.assign(warps_each * blocks.size(), Group{});
    clusters.assign((blocks.size() + blocks_of_cluster - 1) / blocks_of_cluster, Group{});
    for (int i = 0; i < count; ++i)
    {
        Thread& thread = threads[i];
        int const number = i / each, within = i % each;
        Block& block = blocks[number];
        block.cluster = &clusters[number / blocks_of_cluster];
        ++block.all.size;
        ++block.cluster->size;
        if (!thread.stack)
            thread.stack.reset(new char[kStack]);
        thread.index = dim3(within % blockDim.x, within / blockDim.x % blockDim.y, within / (blockDim.x * blockDim.y));
        thread.lane = within % 32;
        thread.block = &block;
        thread.warp = &warps[number * warps_each + within / 32];
        thread.done = false;
        ++thread.warp->size;
        thread.started = false;
        thread.copies.clear();
        thread.groups = 0;
    }
    static std::minstd_rand chance(1);
    for (int left = count; left > 0;)
    {
        for (size_t i = 0; i < pending.size();)
        {
            if (chance() % 4 != 0)
            {
                ++i;
                continue;
            }
            std::function<void()> const act = std::move(pending[i]);
            pending[i] = std::move(pending.back());
            pending.pop_back();
            act();
        }
        for (int i = 0; i < count; ++i)
        {
            if (i % 32 == 0 && count > 32 && chance() % 4 == 0)
            {
                i += 31;
                continue;
            }
            if (threads[i].done)
                continue;
            current = &threads[i];
            threadIdx = current->index;
            blockIdx = current->block->index;
            go_on();
            left -= current->done;
        }
    }
    if (!pending.empty())
    {
        std::fprintf(stderr, "%zu copies are under way when the kernel ends\n", pending.size());
        std::abort();
    }
}

void run(Launch const& launch, std::function<void()> const& thread)
{
    body = &thread;
    gridDim = launch.grid;
    blockDim = launch.block;
    blocks_of_cluster = launch.cluster;
    bool const together = launch.cluster > 1 || launch.cooperative;
    blocks.clear();
    for (unsigned z = 0; z < launch.grid.z; ++z)
    {
        for (unsigned y = 0; y < launch.grid.y; ++y)
        {
            for (unsigned x = 0; x < launch.grid.x; ++x)
            {
                blocks.emplace_back();
                blocks.back().index = dim3(x, y, z);
                blocks.back().shared.assign(launch.shared_bytes + 1023, 0xff); // nobody may count on zeros
                if (!together)
                {
                    run_blocks();
                    blocks.clear();
                }
            }
        }
    }
    if (together)
        run_blocks();
}
} // namespace emulator

// A small GPU, so that both choices of the launchers (few rows, many rows) are cheap to reach.
extern "C" cudaError_t cudaGetDevice(int* device)
{
    *device = 0;
    return cudaSuccess;
}
extern "C" cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int)
{
    switch (attribute)
    {
    case cudaDevAttrComputeCapabilityMajor: *value = std::getenv("ONNXFUSE_EMULATED_MAJOR") ? std::atoi(std::getenv("ONNXFUSE_EMULATED_MAJOR")) : 9; break;
    case cudaDevAttrCooperativeLaunch: *value = 1; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = emulator::setting("ONNXFUSE_EMULATED_SHARED", 40 * 1024); break;
    default: *value = emulator::setting("ONNXFUSE_EMULATED_SMS", 2);
    }
    return cudaSuccess;
}

extern "C" cudaError_t cudaMemcpyAsync(void* to, void const* from, size_t bytes, cudaMemcpyKind, cudaStream_t)
{
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}
extern "C" cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t)
{
    std::memset(to, value, bytes);
    return cudaSuccess;
}
