// Which threads do what: plain host code, so that it is tested without a GPU.
//
// A "vector" is what one load instruction brings: 16 bytes where width and pointers allow it, else one element.
#pragma once

#include <algorithm>
#include <cstdint>

#include "dtype.h"

namespace onnxfuse
{
constexpr int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

// Rows of a row-wise reduction: `threads` of a block share a row and hold `per_thread` vectors each. A row of one warp needs no
// block barrier, and then a block takes several rows.
struct RowGeometry
{
    int threads = 0;
    int per_thread = 0;
    int rows_per_block = 0;
    int64_t blocks = 0;

    bool valid() const
    {
        return threads > 0;
    }
};

// The vectors per thread for which kernels exist, ascending; `vector` is 8 or 4 (16 bytes of 2- or 4-byte elements) or 1.
inline int next_per_thread(int wanted, int vector)
{
    constexpr int kEight[] = {1, 2, 3, 4};
    constexpr int kFour[] = {1, 2, 3, 4, 6, 8};
    constexpr int kOne[] = {2, 8, 32};
    auto pick = [wanted](int const* begin, int const* end) {
        int const* found = std::lower_bound(begin, end, wanted);
        return found == end ? 0 : *found;
    };
    if (vector == 8)
        return pick(kEight, kEight + 4);
    if (vector == 4)
        return pick(kFour, kFour + 6);
    return pick(kOne, kOne + 3);
}

// The fewest threads whose registers hold a row. 32 single elements a thread exist for kMaxThreads only.
inline int64_t fewest_threads(int64_t vectors, int vector)
{
    constexpr int64_t kSingles = 8;
    if (vector == 1 && vectors > kSingles * kMaxThreads)
        return kMaxThreads;
    int64_t const most = vector == 1 ? kSingles : kMaxValuesPerThread / vector;
    return 32 * ceil_div(vectors, 32 * most);
}

// rows >= 1, 1 <= width <= kMaxWidth, width a multiple of `vector`. `sms` is the number of multiprocessors. `wanted` is the
// number of threads that share a row, or 0 to choose; where kernels do not exist for it the result is not valid().
//
// Few rows leave most of the GPU idle whatever is done, and the time is one row's latency: as many threads a row as have a vector
// to load. Many rows are bound by memory: one warp a row while a row fits its registers, as it has no barrier to wait at.
inline RowGeometry row_geometry(int64_t rows, int width, int vector, int sms, int wanted)
{
    int64_t const vectors = width / vector;
    int64_t const least_threads = fewest_threads(vectors, vector);
    bool const few = rows <= int64_t{8} * sms;

    int64_t threads = wanted;
    if (wanted == 0)
    {
        if (few)
            threads = 32 * ceil_div(vectors, 32);
        else if (least_threads == 32)
            threads = 32;
        else
            threads = 32 * ceil_div(vectors, 32 * 2);
        threads = std::clamp<int64_t>(threads, least_threads, kMaxThreads);
    }
    if (threads % 32 != 0 || threads < least_threads || threads > kMaxThreads)
        return {};

    RowGeometry chosen;
    chosen.threads = static_cast<int>(threads);
    chosen.per_thread = next_per_thread(static_cast<int>(ceil_div(vectors, threads)), vector);
    chosen.rows_per_block = threads == 32 ? static_cast<int>(std::clamp<int64_t>(rows / (int64_t{4} * sms), 1, 8)) : 1;
    chosen.blocks = ceil_div(rows, chosen.rows_per_block);
    if (chosen.per_thread == 0 || chosen.blocks > INT32_MAX)
        return {};
    return chosen;
}

// An element-wise kernel with one operand per column: a thread keeps one vector of columns and goes down some rows.
struct ColumnGeometry
{
    int threads_x = 0; // vectors of columns in a block
    int threads_y = 0; // rows in a block at a time
    int rows_each = 0; // rows of a thread, threads_y apart
    int64_t blocks_x = 0;
    int64_t blocks_y = 0;

    bool valid() const
    {
        return threads_x > 0;
    }
};

constexpr int kColumnThreads = 256;
// Rows whose loads are under way in a thread together.
constexpr int kColumnRows = 2;

// rows >= 1, width >= 1 and a multiple of `vector`. One row each while that does not fill the GPU; then kColumnRows each and as many
// blocks as that takes, so that blocks that end make room for others until the very end. Beyond what a grid may have, threads begin again.
inline ColumnGeometry column_geometry(int64_t rows, int64_t width, int vector, int sms)
{
    constexpr int kBlocksPerSm = 8;
    int64_t const vectors = width / vector;
    ColumnGeometry chosen;
    chosen.blocks_x = ceil_div(vectors, kColumnThreads);
    chosen.threads_x = static_cast<int>(ceil_div(vectors, chosen.blocks_x));
    chosen.threads_y = static_cast<int>(std::min<int64_t>(kColumnThreads / chosen.threads_x, rows));
    if (chosen.blocks_x > INT32_MAX)
        return {};
    bool const fills = ceil_div(rows, chosen.threads_y) > int64_t{kBlocksPerSm} * sms / chosen.blocks_x;
    chosen.rows_each = fills ? kColumnRows : 1;
    chosen.blocks_y = std::min<int64_t>(ceil_div(rows, int64_t{chosen.threads_y} * chosen.rows_each), 65535);
    return chosen;
}
} // namespace onnxfuse
