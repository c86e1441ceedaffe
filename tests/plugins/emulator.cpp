#include "emulator.h"

#include <memory>
#include <vector>

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

    void release_if_all()
    {
        if (arrived == size)
        {
            arrived = 0;
            ++generation;
        }
    }
};

struct Thread
{
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    dim3 index;
    int lane = 0;
    Group* warp = nullptr;
    bool done = false;
};

constexpr size_t kStack = 64 * 1024;
ucontext_t scheduler;
std::vector<Thread> threads;
std::vector<Group> warps;
Group block;
Thread* current = nullptr;
std::function<void()> const* body = nullptr;

void yield()
{
    swapcontext(&current->context, &scheduler);
}

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
    for (Group* group : {current->warp, &block})
    {
        --group->size;
        if (group->size > 0)
            group->release_if_all();
    }
    yield();
}
} // namespace

void wait_for_block()
{
    wait(block);
}

void wait_for_warp()
{
    wait(*current->warp);
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

static void run_block()
{
    int const count = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
    if (static_cast<int>(threads.size()) < count)
        threads.resize(count);
    warps.assign((count + 31) / 32, Group{});
    block = Group{};
    block.size = count;
    for (int i = 0; i < count; ++i)
    {
        Thread& thread = threads[i];
        if (!thread.stack)
            thread.stack.reset(new char[kStack]);
        thread.index = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y));
        thread.lane = i % 32;
        thread.warp = &warps[i / 32];
        thread.done = false;
        ++thread.warp->size;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = kStack;
        makecontext(&thread.context, enter, 0);
    }
    for (int left = count; left > 0;)
    {
        for (int i = 0; i < count; ++i)
        {
            if (threads[i].done)
                continue;
            current = &threads[i];
            threadIdx = current->index;
            swapcontext(&scheduler, &current->context);
            left -= current->done;
        }
    }
}

void run(dim3 grid, dim3 block_size, std::function<void()> const& thread)
{
    body = &thread;
    gridDim = grid;
    blockDim = block_size;
    for (unsigned z = 0; z < grid.z; ++z)
    {
        for (unsigned y = 0; y < grid.y; ++y)
        {
            for (unsigned x = 0; x < grid.x; ++x)
            {
                blockIdx = dim3(x, y, z);
                run_block();
            }
        }
    }
}
} // namespace emulator

// A small GPU, so that both choices of the launchers (few rows, many rows) are cheap to reach.
extern "C" cudaError_t cudaGetDevice(int* device)
{
    *device = 0;
    return cudaSuccess;
}
extern "C" cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int)
{
    *value = 2;
    return cudaSuccess;
}
