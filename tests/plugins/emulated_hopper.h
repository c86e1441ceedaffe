// What plugins/common/hopper.cuh has, on the host. Included in its place, after common/blocks.cuh.
#pragma once

namespace onnxfuse
{
struct TileMap
{
    uint16_t const* matrix;
    int64_t rows, columns;
    int tile_rows;
};
inline cudaError_t make_tile_map(TileMap& map, void const* matrix, bool, int64_t rows, int64_t columns, int tile_rows)
{
    map = {static_cast<uint16_t const*>(matrix), rows, columns, tile_rows};
    return cudaSuccess;
}

inline void map_ahead(TileMap const*) {}

inline uintptr_t exchanged(uintptr_t address)
{
    return address ^ (address >> 7 & 7) << 4;
}
inline void copy_tile(void* to, TileMap const* map, int row, int column, uint64_t* barrier)
{
    auto const base = reinterpret_cast<uintptr_t>(to);
    if (base % 1024 != 0)
        std::abort();
    for (int r = 0; r < map->tile_rows; ++r)
    {
        for (int c = 0; c < 64; ++c)
        {
            bool const there = row + r < map->rows && column + c < map->columns;
            *reinterpret_cast<uint16_t*>(exchanged(base + r * 128 + c * 2)) = there ? map->matrix[(row + r) * map->columns + column + c] : 0;
        }
    }
    reinterpret_cast<Barrier*>(barrier)->take(map->tile_rows * 128);
}

struct Operand
{
    uintptr_t at;
    int piece;
};
inline Operand operand_rows(void const* at)
{
    return {reinterpret_cast<uintptr_t>(at), 0};
}
inline Operand operand_columns(void const* at, int piece)
{
    return {reinterpret_cast<uintptr_t>(at), piece};
}
inline void products_fence() {}
inline void products_commit() {}
template <int kLeft>
void products_wait()
{
    emulator::wait_for_group(); // a product is done when all four warps have begun it
}
template <int kRegisters>
void take_registers()
{
}
template <int kRegisters>
void give_registers()
{
}

template <int N, typename T>
void multiply_group(float (&c)[N], Operand a, Operand b, int add, T)
{
    int const lane = emulator::lane(), warp = static_cast<int>(threadIdx.x) / 32 % 4;
    for (int i = 0; i < N; ++i)
    {
        int const row = 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = add ? c[i] : 0.0f;
        for (int k = 0; k < 16; ++k)
        {
            uintptr_t const at_a = exchanged(a.at + row / 8 * 1024 + row % 8 * 128 + k * 2);
            uintptr_t const at_b = exchanged(b.at + column / 64 * b.piece + k / 8 * 1024 + k % 8 * 128 + column % 64 * 2);
            sum += widen(*reinterpret_cast<T const*>(at_a)) * widen(*reinterpret_cast<T const*>(at_b));
        }
        c[i] = sum;
    }
}
} // namespace onnxfuse
