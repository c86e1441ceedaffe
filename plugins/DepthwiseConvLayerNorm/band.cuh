// The same on tensor cores for 16-bit types, sums in registers from the first product to the output.
//
// A convolution along x is a product with a band matrix: of 16 inputs in a row, 8 outputs are the product with a [16, 8] matrix that holds the
// kernel's row, each column shifted by one. mma's other operand holds 16 places: blocks of 8 pixels along x, and rows (groups of kRows, so that an
// input row, once read, serves all output rows of its place). 7 of 16 products count, three to four times what float32 units do.
//
// A warp makes 8 channels of all pixels of the tile. So mean and squared distances of 8 channels are a thread's own, one sum over the warps and one
// over the cluster follow, and 8 channels of a pixel are the 16 bytes that are written.
//
// Input lies in shared memory channel by channel, two pixels a word: the transposition is where two pixels' 8 channels are loaded and 8 words stored.
#pragma once

#include "../common/tensor.cuh"
#include "launch.h"

namespace onnxfuse
{
// Bytes of the table of a channel: [8][8] words.
constexpr int kBandTable = 256;

// How a tile is cut. Plain host code too.
struct BandShape
{
    int across;              // blocks of 8 pixels along x, of a tile
    int slots_log, down_log; // places are [images][1 << down_log][1 << slots_log]: groups of rows, blocks along x (the last ones may be none)
    int images;              // of a tile: 1 or 2
    int in_rows;             // of an image of the tile
    int pairs, pairs_magic;  // words of an input row; i / pairs is i * pairs_magic >> 18 for what comes up here
    int row_bytes, plane_bytes, group_bytes;
    int lanes_log;           // lanes next to each other that load channels next to each other
    int slot_bytes;          // of a pixel's output in shared memory
    int second, bytes;       // where the table of weights and later the statistics lie

    __host__ __device__ BandShape(int kernel, int rows, int blocks, int images_wanted, int height, int channels, int split)
    {
        across = blocks;
        slots_log = blocks > 4 ? 3 : blocks > 2 ? 2 : blocks > 1 ? 1 : 0;
        images = images_wanted;
        down_log = 4 - slots_log - (images - 1);
        while (down_log > 0 && rows << (down_log - 1) >= height)
            --down_log;
        in_rows = (rows << down_log) + kernel - 1;
        pairs = 4 * blocks + 4;
        pairs_magic = ((1 << 18) + pairs - 1) / pairs;
        row_bytes = 4 * pairs;
        // Eight places that are read together should meet other banks.
        if (slots_log < 3 && rows * row_bytes % 128 / 16 % (2 << slots_log) != 1 << slots_log && rows * (row_bytes + 16) % 128 / 16 % (2 << slots_log) == 1 << slots_log)
            row_bytes += 16;
        plane_bytes = images * in_rows * row_bytes;
        int const pieces = channels / 8;
        lanes_log = pieces % 4 == 0 ? 2 : pieces % 2 == 0 ? 1 : 0;
        group_bytes = 8 * plane_bytes + (128 >> lanes_log) % 128;
        slot_bytes = 2 * channels + 16;
        auto const most = [](int a, int b) { return a > b ? a : b; };
        int const pixels = 128 * rows;
        second = (most(pieces * group_bytes, most(pieces * pixels * 8, pixels * (slot_bytes + 2))) + 127) / 128 * 128;
        bytes = second + most(channels * kBandTable, split * pixels * 8);
    }
};

template <typename T>
struct BandArgs
{
    T const* input;
    T const* weight;
    T const* bias;
    T const* gamma;
    T const* beta;
    T* output;
    int images, height, width, channels;
    int split, planar;
    float epsilon, inverse_split, inverse_pieces, inverse_channels;
    BandShape shape;
};

constexpr int band_threads(int rows)
{
    return rows == 1 ? 512 : 384;
}

// Mean and squared distances from it of `count` parts of `each` values (Chan, Golub, LeVeque 1979).
__device__ __forceinline__ float2 merged(float2 const* parts, int count, float inverse, int apart, float each)
{
    float mean = 0.0f, squares = 0.0f;
#pragma unroll 4
    for (int i = 0; i < count; ++i)
        mean += parts[i * apart].x;
    mean *= inverse;
#pragma unroll 4
    for (int i = 0; i < count; ++i)
    {
        float2 const part = parts[i * apart];
        squares += part.y + (part.x - mean) * (part.x - mean) * each;
    }
    return make_float2(mean, squares);
}

// What a value is multiplied with, and what is added then, to be normalised.
__device__ __forceinline__ float2 normaliser(float2 mean_and_squares, float inverse_count, float epsilon)
{
    float const scale = rsqrtf(mean_and_squares.y * inverse_count + epsilon);
    return make_float2(scale, -mean_and_squares.x * scale);
}

// gridDim: tiles along x, `split` blocks each; tiles along y; groups of images. blockDim.x: 4 threads for each channel of the block.
template <typename T, int kKernel, int kRows>
__global__ void __launch_bounds__(band_threads(kRows)) depthwise_layernorm_band(__grid_constant__ BandArgs<T> const args)
{
    ONNXFUSE_SHARED(shared);
    constexpr int kRadius = kKernel / 2, kPixels = 128 * kRows;
    constexpr int kAtOnce = kRows == 4 ? 7 : 8; // pairs of pixels of a thread whose loads are under way together
    constexpr int kTogether = 4 / kRows;                          // channels whose products take turns, so that none waits for the one before
    BandShape const& shape = args.shape;
    int const thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32, pieces = static_cast<int>(blockDim.x) / 32;
    int const rank = args.split > 1 ? cluster_rank() : 0, tile_x = args.split > 1 ? cluster_of_grid() : static_cast<int>(blockIdx.x);
    int const x0 = tile_x * shape.across * 8, y0 = static_cast<int>(blockIdx.y) * (kRows << shape.down_log), image0 = static_cast<int>(blockIdx.z) * shape.images;
    int const first_channel = rank * 8 * pieces;
    unsigned char* const table = shared + shape.second;

    // table[channel][i][ky]: weights i - 1 and i of a kernel's row; the halves of 16 bytes change places where i > 3, for other banks.
    auto const* const weight = reinterpret_cast<uint16_t const*>(args.weight) + first_channel * (kKernel * kKernel);
#pragma unroll 1
    for (int i = thread; i < 64 * pieces; i += 32 * pieces)
    {
        int const e = i % 8;
        uint16_t const* const from = weight + i / 8 * (kKernel * kKernel) + e;
        uint32_t words[8] = {};
#pragma unroll
        for (int ky = 0; ky < kKernel; ++ky)
        {
            uint32_t const low = e > 0 && e <= kKernel ? from[ky * kKernel - 1] : 0, high = e < kKernel ? from[ky * kKernel] : 0;
            words[ky] = low | high << 16;
        }
        unsigned char* const to = table + i / 8 * kBandTable + e * 32;
        *reinterpret_cast<uint4*>(to + (e / 4) * 16) = make_uint4(words[0], words[1], words[2], words[3]);
        *reinterpret_cast<uint4*>(to + (e / 4 ^ 1) * 16) = make_uint4(words[4], words[5], words[6], words[7]);
    }
    Vector<T, 8> bias{}, gamma{}, beta{};
    if (args.bias)
        bias = load<T, 8>(args.bias + first_channel + 8 * warp, 0);
    auto const load_affine = [&] {
        if (args.gamma)
            gamma = load<T, 8>(args.gamma + first_channel + 8 * warp, 0);
        if (args.beta)
            beta = load<T, 8>(args.beta + first_channel + 8 * warp, 0);
    };
    if constexpr (kRows == 1) // else registers are few
        load_affine();
    wait_for_kernel_before();
    next_may_start();

    int const words = shape.images * shape.in_rows * shape.pairs;
    auto const* const input = reinterpret_cast<uint16_t const*>(args.input) + int64_t{image0} * args.height * args.width * args.channels;
    // Where word i of the tile comes from: its row is there; x; the offset of that pixel, in pixels (of a plane) from the first image's.
    struct Word
    {
        bool there;
        int x, pixel;
    };
    int const next_image = args.planar ? args.channels * args.height * args.width : args.height * args.width;
    auto const word_at = [&](int i) {
        int row = i * shape.pairs_magic >> 18, x = x0 - 4 + 2 * (i - row * shape.pairs), pixel = 0;
        bool there = i < words;
        if (row >= shape.in_rows)
        {
            row -= shape.in_rows;
            pixel = next_image;
            there = there && image0 + 1 < args.images;
        }
        int const y = y0 - kRadius + row;
        return Word{there && static_cast<unsigned>(y) < static_cast<unsigned>(args.height), x, pixel + y * args.width + x};
    };
    auto const to_of = [&](int i) {
        int const row = i * shape.pairs_magic >> 18;
        return row * shape.row_bytes + (i - row * shape.pairs) * 4;
    };
    unsigned const width = static_cast<unsigned>(args.width);
    if (!args.planar)
    {
        int const apart = 32 >> shape.lanes_log, low = (1 << shape.lanes_log) - 1;
        int const piece = (warp & ~low) + (lane & low);
        unsigned char* const plane = shared + piece * shape.group_bytes;
        auto const* const from = input + first_channel + 8 * piece;
#pragma unroll 1
        for (int first = (warp & low) * apart + (lane >> shape.lanes_log); first < words; first += 32 * kAtOnce)
        {
            uint4 left[kAtOnce], right[kAtOnce];
#pragma unroll
            for (int u = 0; u < kAtOnce; ++u)
            {
                Word const word = word_at(first + 32 * u);
                uint16_t const* const at = from + word.pixel * args.channels;
                left[u] = right[u] = make_uint4(0, 0, 0, 0);
                if (word.there && static_cast<unsigned>(word.x) < width)
                    left[u] = *reinterpret_cast<uint4 const*>(at);
                if (word.there && static_cast<unsigned>(word.x + 1) < width)
                    right[u] = *reinterpret_cast<uint4 const*>(at + args.channels);
            }
#pragma unroll
            for (int u = 0; u < kAtOnce; ++u)
            {
                int const i = first + 32 * u;
                if (i >= words)
                    break;
                unsigned char* to = plane + to_of(i);
                uint32_t const a[4] = {left[u].x, left[u].y, left[u].z, left[u].w}, b[4] = {right[u].x, right[u].y, right[u].z, right[u].w};
#pragma unroll
                for (int j = 0; j < 4; ++j)
                {
                    *reinterpret_cast<uint32_t*>(to) = (a[j] & 0xffffu) | b[j] << 16;
                    *reinterpret_cast<uint32_t*>(to + shape.plane_bytes) = a[j] >> 16 | (b[j] & 0xffff0000u);
                    to += 2 * shape.plane_bytes;
                }
            }
        }
    }
    else
    {
        auto const* from = input + (first_channel + 8 * warp) * args.height * args.width;
        unsigned char* plane = shared + warp * shape.group_bytes;
#pragma unroll 1
        for (int c = 0; c < 8; ++c)
        {
#pragma unroll 2
            for (int i = lane; i < words; i += 32)
            {
                Word const word = word_at(i);
                uint16_t const* const at = from + word.pixel;
                uint32_t const left = word.there && static_cast<unsigned>(word.x) < width ? at[0] : 0;
                uint32_t const right = word.there && static_cast<unsigned>(word.x + 1) < width ? at[1] : 0;
                *reinterpret_cast<uint32_t*>(plane + to_of(i)) = left | right << 16;
            }
            from += args.height * args.width;
            plane += shape.plane_bytes;
        }
    }
    __syncthreads();

    // What this thread's place in the band matrix holds: weights d and d + 1 in the window's first half, d + 8 and d + 9 in the second; one of the
    // two is zero.
    int const g = lane / 4, q = lane % 4, d = 2 * q - g - (4 - kRadius);
    int const entry = (d + (d >= -1 ? 1 : 9)) & 7, entry_at = entry * 32 + (entry / 4 & 1) * 16;
    uint32_t const in_low = d >= -1 ? 0xffffffffu : 0;
    // The place whose address this lane gives, lane % 16, and the half of the window.
    int const slots = (1 << shape.slots_log) - 1, downs = (1 << shape.down_log) - 1;
    auto const place_row = [&](int place) { return min(place >> (shape.slots_log + shape.down_log), shape.images - 1) * shape.in_rows + ((place >> shape.slots_log) & downs) * kRows; };
    unsigned char const* const window = shared + warp * shape.group_bytes + place_row(lane % 16) * shape.row_bytes + min(lane & slots, shape.across - 1) * 16 + lane / 16 * 16;
    unsigned char const* const weights = table + warp * (8 * kBandTable);
    float sums[8][kRows][4];
    {
        float b[8];
        unpack(bias, b);
#pragma unroll
        for (int c = 0; c < 8; ++c)
        {
#pragma unroll
            for (int y = 0; y < kRows; ++y)
                sums[c][y][0] = sums[c][y][1] = sums[c][y][2] = sums[c][y][3] = b[c];
        }
    }
#pragma unroll
    for (int c = 0; c < 8; c += kTogether)
    {
        uint32_t low[kTogether][8], high[kTogether][8];
#pragma unroll
        for (int i = 0; i < kTogether && kRows < 4; ++i)
        {
            unsigned char const* const from = weights + (c + i) * kBandTable;
            uint4 const a = *reinterpret_cast<uint4 const*>(from + entry_at), b = *reinterpret_cast<uint4 const*>(from + (entry_at ^ 16));
            uint32_t const all[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int ky = 0; ky < kKernel; ++ky)
            {
                low[i][ky] = all[ky] & in_low;
                high[i][ky] = all[ky] & ~in_low;
            }
        }
#pragma unroll
        for (int row = 0; row < kRows + kKernel - 1; ++row)
        {
            if (kRows == 4 && row < kKernel) // word by word, since registers are few
            {
                uint32_t const word = *reinterpret_cast<uint32_t const*>(weights + c * kBandTable + (entry_at ^ row / 4 * 16) + row % 4 * 4);
                low[0][row] = word & in_low;
                high[0][row] = word & ~in_low;
            }
            uint32_t in[kTogether][4];
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
                load_matrices(in[i], window + (c + i) * shape.plane_bytes + row * shape.row_bytes);
#pragma unroll
            for (int y = 0; y < kRows; ++y)
            {
                if (row - y >= 0 && row - y < kKernel)
                {
#pragma unroll
                    for (int i = 0; i < kTogether; ++i)
                        mma(sums[c + i][y], in[i], low[i][row - y], high[i][row - y], T{});
                }
            }
        }
    }
    if (args.split > 1)
        cluster_arrive();
    __syncthreads(); // the input's place is free

    // Pixel of the tile: [row of its group][place][8].
    float2* const parts = reinterpret_cast<float2*>(shared);
    float2* const stats = reinterpret_cast<float2*>(shared + shape.second);
#pragma unroll
    for (int y = 0; y < kRows; ++y)
    {
        float mean[4], squares[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
        {
            mean[e] = squares[e] = 0.0f;
#pragma unroll
            for (int c = 0; c < 8; ++c)
                mean[e] += sums[c][y][e];
            mean[e] *= 0.125f;
#pragma unroll
            for (int c = 0; c < 8; ++c)
                squares[e] = fmaf(sums[c][y][e] - mean[e], sums[c][y][e] - mean[e], squares[e]);
        }
        float2* const to = parts + warp * kPixels + y * 128 + g * 8 + 2 * q;
        *reinterpret_cast<float4*>(to) = make_float4(mean[0], squares[0], mean[1], squares[1]);
        *reinterpret_cast<float4*>(to + 64) = make_float4(mean[2], squares[2], mean[3], squares[3]);
    }
    __syncthreads();
    if constexpr (kRows > 1)
        load_affine(); // it comes while the cluster waits
    if (args.split > 1)
        cluster_wait(); // no block reads its table any more
#pragma unroll 1
    for (int p = thread; p < kPixels; p += 32 * pieces)
    {
        float2 const own = merged(parts + p, pieces, args.inverse_pieces, kPixels, 8.0f);
        if (args.split > 1)
        {
#pragma unroll 1
            for (int other = 0; other < args.split; ++other)
                remote_store(stats + rank * kPixels + p, other, own);
        }
        else
        {
            stats[p] = normaliser(own, args.inverse_channels, args.epsilon);
        }
    }
    if (args.split > 1)
    {
        cluster_arrive();
        cluster_wait();
#pragma unroll 1
        for (int p = thread; p < kPixels; p += 32 * pieces)
        {
            float2 const all = merged(stats + p, args.split, args.inverse_split, kPixels, static_cast<float>(8 * pieces));
            stats[p] = normaliser(all, args.inverse_channels, args.epsilon);
        }
    }
    __syncthreads();

    float scale[8], shift[8];
    unpack(gamma, scale);
    unpack(beta, shift);
    if (!args.gamma)
    {
#pragma unroll
        for (int c = 0; c < 8; ++c)
            scale[c] = 1.0f;
    }
#pragma unroll
    for (int y = 0; y < kRows; ++y)
    {
#pragma unroll
        for (int e = 0; e < 4; ++e)
        {
            int const place = g + e / 2 * 8, p = y * 128 + place * 8 + 2 * q + e % 2;
            float2 const by = stats[p];
            float v[8];
#pragma unroll
            for (int c = 0; c < 8; ++c)
                v[c] = fmaf(fmaf(sums[c][y][e], by.x, by.y), scale[c], shift[c]);
            Vector<T, 8> rounded;
            pack(v, rounded);
            *reinterpret_cast<uint4*>(shared + p * shape.slot_bytes + p / 8 * 16 + warp * 16) = rounded.v;
        }
    }
    __syncthreads();
    int const piece = thread % pieces;
    T* const output = args.output + first_channel + 8 * piece;
#pragma unroll 2
    for (int p = thread / pieces; p < kPixels; p += 32)
    {
        int const place = p / 8 & 15, block = place & slots, image = image0 + (place >> (shape.slots_log + shape.down_log));
        int const y = y0 + ((place >> shape.slots_log) & downs) * kRows + p / 128, x = x0 + 8 * block + p % 8;
        bool const there = block < shape.across && image < min(args.images, image0 + shape.images) && y < args.height && x < args.width;
        if (there)
            *reinterpret_cast<uint4*>(output + ((int64_t{image} * args.height + y) * args.width + x) * args.channels)
                = *reinterpret_cast<uint4 const*>(shared + p * shape.slot_bytes + p / 8 * 16 + piece * 16);
    }
}
} // namespace onnxfuse
