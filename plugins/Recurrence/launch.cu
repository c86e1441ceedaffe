#include "launch.h"

#include <algorithm>
#include <cmath>

#include "../common/cluster.cuh"
#include "../common/launch.cuh"
#include "kernels.h"

namespace onnxfuse
{
namespace
{
using Problem = OnnxfuseRecurrence;

struct Device
{
    int multiprocessors = 0;
    int major = 0;
    int cooperative = 0;
    int shared_bytes = 0; // of a block at most
};

cudaError_t device_here(Device& device)
{
    int index = 0;
    cudaError_t status = cudaGetDevice(&index);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, index);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&device.major, cudaDevAttrComputeCapabilityMajor, index);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&device.cooperative, cudaDevAttrCooperativeLaunch, index);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    return status;
}

// --- how ---------------------------------------------------------------------------------------------------------------

// The variant and its parameters, as chosen or as given.
struct Choice
{
    int variant = 0;
    PersistentShape shape{};
    bool wavefront = false; // all layers in one launch
    int columns = 0;        // kRecurrenceResident: batch rows at a time
    int most_in_wavefront = 0; // batch rows
};

bool is_half(Problem const& p)
{
    return p.dtype == static_cast<int>(Dtype::kFloat16) || p.dtype == static_cast<int>(Dtype::kBfloat16);
}

size_t element(Problem const& p)
{
    return is_half(p) ? 2 : 4;
}

// Whether there are kernels of kRecurrenceGrid. Where kRecurrenceResident computes the same, it is two to six times as fast.
template <typename T>
constexpr bool has_grid(int cell)
{
    return sizeof(T) == 4 || cell == static_cast<int>(Cell::kGruResetFirst);
}

PersistentShape shape_for(Problem const& p, int variant, Device const& device)
{
    PersistentShape shape{};
    if (variant == kRecurrenceIndependent)
    {
        shape.slices = p.hidden <= 64 ? 2 : 4;
        shape.tiles = p.hidden <= 64 ? 1 : 2;
        shape.cluster = 1;
        shape.rows = p.rows;
        if (!shape.rows)
        {
            // The fewest rows a block that leave all blocks resident at once; where a warp has two tiles, two rows cost no more than one.
            shape.rows = shape.tiles;
            while (shape.rows < 4 && int64_t{p.directions} * ceil_div(p.batch, shape.rows) > device.multiprocessors)
                shape.rows *= 2;
            if (p.hidden <= 64 && shape.rows > 1)
                shape.rows = 8;
        }
    }
    else
    {
        shape.rows = p.rows ? p.rows : p.batch == 1 ? 1 : 8;
        shape.tiles = 1;
        shape.cluster = p.cluster ? p.cluster : p.hidden > 256 || (p.hidden > 128 && shape.rows == 1) ? 16 : 8;
        shape.slices = p.hidden > 256 ? 16 : p.hidden > 128 || shape.rows > 1 || shape.cluster > 8 ? 8 : 4;
    }
    return shape;
}

template <typename T>
cudaError_t find(Problem const& p, PersistentShape const& shape, PersistentKernel<T>& found)
{
    found = find_persistent<T>(shape, p.cell != static_cast<int>(Cell::kLstm));
    return found.kernel ? cudaSuccess : cudaErrorNotSupported;
}

int roles(int layers)
{
    return 2 * layers - 1;
}

int persistent_threads(Problem const& p, PersistentShape const& shape)
{
    // What a block of a cluster sends for several rows is pieces of 8 units.
    if (shape.cluster > 1 && shape.rows > 1)
        return 64 * static_cast<int>(ceil_div(p.hidden, 8 * shape.cluster));
    return 32 * static_cast<int>(ceil_div(p.hidden, 4 * shape.tiles * shape.cluster));
}

template <typename T>
cudaError_t prepare(PersistentKernel<T> const& found)
{
    cudaError_t status = cudaFuncSetAttribute(found.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, found.shared_bytes);
    if (status == cudaSuccess && found.shape.cluster > 8)
        status = cudaFuncSetAttribute(found.kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    return status;
}

// How many clusters of this kernel are resident at once on an idle device.
template <typename T>
cudaError_t resident_clusters(Problem const& p, PersistentKernel<T> const& found, int& count)
{
    cudaError_t status = prepare(found);
    if (status != cudaSuccess)
        return status;
    cudaLaunchAttribute attribute = cluster_attribute(found.shape.cluster);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(found.shape.cluster));
    config.blockDim = dim3(static_cast<unsigned>(persistent_threads(p, found.shape)));
    config.dynamicSmemBytes = static_cast<size_t>(found.shared_bytes);
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaOccupancyMaxActiveClusters(&count, found.kernel, &config);
}

// kRecurrenceResident: the smallest blocks that are all resident at once; without columns where there are none.
void shape_resident(Problem const& p, Device const& device, Choice& choice)
{
    choice.shape.slices = p.hidden <= 256 ? 1 : p.hidden <= 512 ? 2 : 4;
    for (int tiles : {4, 2, 1})
    {
        bool const exists = tiles > 1 || choice.shape.slices <= 2;
        if (exists && p.directions * ceil_div(p.hidden, 4 * tiles) <= device.multiprocessors)
            choice.shape.tiles = tiles;
    }
    if (choice.shape.tiles == 0)
        return;
    int const units = 4 * choice.shape.tiles;
    int64_t const left = device.shared_bytes - int64_t{p.batch} * units * int64_t{sizeof(State)};
    int64_t const fitting = left / (kResidentWarps * units * int64_t{sizeof(float4)}) / 8 * 8;
    choice.columns = static_cast<int>(std::clamp<int64_t>(fitting, 0, ceil_div(p.batch, 8) * 8));
}

size_t resident_shared_bytes(Problem const& p, Choice const& choice)
{
    return size_t(4) * choice.shape.tiles * (kResidentWarps * sizeof(float4) * choice.columns + sizeof(State) * p.batch);
}

template <typename T>
cudaError_t choose(Problem const& p, Choice& choice)
{
    Device device;
    if (cudaError_t const status = device_here(device); status != cudaSuccess)
        return status;
    if (p.dtype == static_cast<int>(Dtype::kBfloat16) && device.major < 8)
        return cudaErrorNotSupported;
    bool const persistent = is_half(p) && p.cell != static_cast<int>(Cell::kGruResetFirst);
    bool const independent = persistent && p.hidden <= 128;
    bool const cluster = persistent && p.hidden <= 512 && device.major >= 9;
    bool const grid = has_grid<T>(p.cell) && device.cooperative;
    choice.variant = p.variant;
    if (choice.variant == kRecurrenceAutomatic)
        choice.variant = independent && !(cluster && p.batch == 1 && p.hidden > 64) ? kRecurrenceIndependent
            : cluster                                                               ? kRecurrenceCluster
            : persistent && device.cooperative && p.hidden <= 1024                  ? kRecurrenceResident
            : grid                                                                  ? kRecurrenceGrid
                                                                                    : kRecurrenceSteps;
    if ((choice.variant == kRecurrenceIndependent && !independent) || (choice.variant == kRecurrenceCluster && !cluster)
        || (choice.variant == kRecurrenceGrid && !grid))
        return cudaErrorNotSupported;
    if (choice.variant == kRecurrenceResident)
    {
        if (!persistent || p.hidden > 1024 || !device.cooperative)
            return cudaErrorNotSupported;
        shape_resident(p, device, choice);
        if (choice.columns > 0)
            return cudaSuccess;
        if (p.variant != kRecurrenceAutomatic)
            return cudaErrorNotSupported;
        choice.variant = kRecurrenceSteps;
    }
    if (choice.variant != kRecurrenceIndependent && choice.variant != kRecurrenceCluster)
        return cudaSuccess;
    if constexpr (sizeof(T) == 2)
    {
        choice.shape = shape_for(p, choice.variant, device);
        // Blocks of a cluster wait for what the others copy to them: there must be others.
        if (choice.shape.cluster > 1 && choice.shape.rows > 1 && p.hidden <= 8)
            return cudaErrorNotSupported;
        PersistentKernel<T> found;
        if (cudaError_t const status = find<T>(p, choice.shape, found); status != cudaSuccess)
            return status;
        if (choice.variant == kRecurrenceCluster && p.layers > 1 && p.directions == 1 && !p.wavefront)
        {
            int fitting = 0;
            if (cudaError_t const status = resident_clusters<T>(p, found, fitting); status != cudaSuccess)
                return status;
            choice.most_in_wavefront = fitting / roles(p.layers) * choice.shape.rows;
            choice.wavefront = p.batch <= choice.most_in_wavefront;
        }
    }
    return cudaSuccess;
}

float limit_of(Problem const& p)
{
    return p.clip > 0.0f ? p.clip : HUGE_VALF;
}

// --- memory ------------------------------------------------------------------------------------------------------------

// Where the parts of the workspace lie, in bytes.
struct Places
{
    size_t sums = 0, between[2] = {}, flags = 0, products = 0, h = 0, c = 0, reset = 0, update = 0, barrier = 0, total = 0;
    size_t clear = 0, clear_bytes = 0; // what must be zero when the recurrence starts
};

Places lay_out(Problem const& p, Choice const& choice)
{
    Places places;
    auto take = [&](size_t bytes) {
        size_t const at = places.total;
        places.total += (bytes + 255) / 256 * 256;
        return at;
    };
    size_t const cells = size_t(p.batch) * p.hidden;
    size_t const all = size_t(p.steps) * p.directions * cells;
    places.sums = take(all * 16);
    places.clear = places.total;
    if (choice.wavefront)
    {
        places.flags = take(size_t(p.layers - 1) * p.steps * cells / 2 * 8);
        places.products = take(size_t(p.layers - 1) * p.steps * cells * 4 * 8);
    }
    if (choice.variant == kRecurrenceGrid || choice.variant == kRecurrenceResident)
        places.barrier = take(256);
    places.clear_bytes = places.total - places.clear;
    if (!choice.wavefront && p.layers > 1)
    {
        places.between[0] = take(all * element(p));
        if (p.layers > 2)
            places.between[1] = take(all * element(p));
    }
    if (choice.variant == kRecurrenceResident)
        places.h = take(2 * size_t(p.directions) * cells * element(p));
    if (choice.variant == kRecurrenceSteps || choice.variant == kRecurrenceGrid)
    {
        size_t const state = size_t(p.directions) * cells * 4;
        places.h = take(2 * state);
        if (p.cell == static_cast<int>(Cell::kLstm))
            places.c = take(state);
        if (p.cell == static_cast<int>(Cell::kGruResetFirst))
        {
            places.reset = take(state);
            places.update = take(state);
        }
    }
    return places;
}

// --- checks ------------------------------------------------------------------------------------------------------------

cudaError_t check_sizes(Problem const& p)
{
    bool const sound = p.dtype >= 0 && p.dtype <= 2 && p.cell >= 0 && p.cell <= 2 && p.directions >= 1 && p.directions <= 2
        && p.layers >= 1 && p.layers <= ONNXFUSE_MAX_LAYERS && p.steps >= 0 && p.batch >= 0 && p.width >= 1 && p.hidden >= 8
        && p.hidden % 8 == 0 && p.variant >= 0 && p.variant <= kRecurrenceResident && p.clip >= 0.0f;
    if (!sound)
        return cudaErrorInvalidValue;
    // Indices of cells within a step are 32 bits wide, and so are the bytes from a step to the next (32 for a flagged cell).
    if (int64_t{p.directions} * p.batch * p.hidden > INT32_MAX / 32 || p.y_step * int64_t(element(p)) > INT32_MAX || int64_t{p.steps} * p.batch > INT32_MAX / 8)
        return cudaErrorInvalidValue;
    return cudaSuccess;
}

cudaError_t check_pointers(Problem const& p)
{
    if (!p.x && p.steps > 0)
        return cudaErrorInvalidValue;
    bool straight = aligned(16, p.y) && (p.y_step | p.y_direction | p.y_row) * int64_t(element(p)) % 16 == 0 && aligned(element(p), p.x);
    straight = straight && (p.state_direction | p.state_row) * int64_t(element(p)) % 16 == 0;
    for (int i = 0; i < p.layers; ++i)
    {
        OnnxfuseRecurrentLayer const& layer = p.layer[i];
        if (!layer.input_weights || !layer.weights)
            return cudaErrorInvalidValue;
        straight = straight && aligned(16, layer.weights, i == 0 ? nullptr : layer.input_weights) && aligned(element(p), layer.input_weights)
            && aligned(16, layer.bias, layer.h0, layer.c0, layer.h_last, layer.c_last);
    }
    return straight ? cudaSuccess : cudaErrorMisalignedAddress;
}

// --- launches ----------------------------------------------------------------------------------------------------------

// Where a layer's output goes and how it lies there.
struct Output
{
    void* data;
    int64_t step, direction, row;
};

// What the kernels of every variant are told alike.
template <typename T, typename Args>
void describe(Args& args, Problem const& p, Output const& output)
{
    args.lengths = p.lengths;
    args.y = static_cast<T*>(output.data);
    args.y_step = output.step;
    args.y_direction = output.direction;
    args.y_row = output.row;
    args.state_direction = p.state_direction;
    args.state_row = p.state_row;
    args.steps = p.steps;
    args.batch = p.batch;
    args.hidden = p.hidden;
    args.reversed = p.reversed;
    args.limit = limit_of(p);
    args.fault = p.fault;
}

struct Input
{
    void const* data;
    int64_t step, row;
    int width;
};

template <typename T, Cell kCell>
cudaError_t launch_projection(Problem const& p, int index, Input const& input, Places const& places, unsigned char* workspace, cudaStream_t stream)
{
    OnnxfuseRecurrentLayer const& layer = p.layer[index];
    ProjectionArgs<T> args{};
    args.x = static_cast<T const*>(input.data);
    args.weights = static_cast<T const*>(layer.input_weights);
    args.bias = static_cast<T const*>(layer.bias);
    args.sums = reinterpret_cast<float*>(workspace + places.sums);
    args.x_step = input.step;
    args.x_row = input.row;
    args.columns = int64_t{p.steps} * p.batch;
    args.batch = p.batch;
    args.hidden = p.hidden;
    args.width = input.width;
    args.clear = reinterpret_cast<uint4*>(workspace + places.clear);
    args.clear_count = static_cast<int64_t>(places.clear_bytes / 16);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(ceil_div(p.hidden, kProjectionUnits)),
        static_cast<unsigned>(ceil_div(args.columns, kProjectionColumns)), static_cast<unsigned>(p.directions));
    config.stream = stream;
    if constexpr (sizeof(T) == 4)
    {
        config.blockDim = dim3(256);
        config.dynamicSmemBytes = 16 * (4 * kProjectionUnits + 4 + kProjectionColumns + 4) * sizeof(float);
        return cudaLaunchKernelEx(&config, project_float<kCell>, args);
    }
    else
    {
        config.blockDim = dim3(128);
        config.dynamicSmemBytes = 3 * (4 * kProjectionUnits + kProjectionColumns) * 128;
        bool const vector = input.width % 8 == 0 && (input.step | input.row) % 8 == 0 && aligned(16, input.data, layer.input_weights);
        return vector ? cudaLaunchKernelEx(&config, project<T, kCell, true>, args) : cudaLaunchKernelEx(&config, project<T, kCell, false>, args);
    }
}

template <typename T>
Layer<T> layer_of(OnnxfuseRecurrentLayer const& given)
{
    return {static_cast<T const*>(given.input_weights), static_cast<T const*>(given.weights), static_cast<T const*>(given.bias),
        static_cast<T const*>(given.h0), static_cast<T const*>(given.c0), static_cast<T*>(given.h_last), static_cast<T*>(given.c_last)};
}

// Layers first to first + count - 1.
template <typename T>
cudaError_t launch_persistent(Problem const& p, Choice const& choice, int first, int count, Output const& output, Places const& places,
    unsigned char* workspace, cudaStream_t stream)
{
    PersistentKernel<T> found;
    cudaError_t status = find<T>(p, choice.shape, found);
    if (status == cudaSuccess)
        status = prepare(found);
    if (status != cudaSuccess)
        return status;
    RecurrentArgs<T> args{};
    for (int i = 0; i < count; ++i)
        args.layers[i] = layer_of<T>(p.layer[first + i]);
    args.sums = reinterpret_cast<float const*>(workspace + places.sums);
    args.handed = reinterpret_cast<uint64_t*>(workspace + places.flags);
    args.products = reinterpret_cast<uint64_t*>(workspace + places.products);
    describe<T>(args, p, output);

    cudaLaunchAttribute attributes[3];
    unsigned attribute_count = 0;
    if (choice.shape.cluster > 1)
        attributes[attribute_count++] = cluster_attribute(choice.shape.cluster);
    if (count > 1 && p.serial != 2)
    {
        // Clusters wait for each other: refused, rather than hung, where they would not all be resident.
        cudaLaunchAttribute& attribute = attributes[attribute_count++];
        attribute.id = cudaLaunchAttributeCooperative;
        attribute.val.cooperative = 1;
    }
    else if (p.serial != 1)
    {
        cudaLaunchAttribute& attribute = attributes[attribute_count++];
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(roles(count) * choice.shape.cluster),
        static_cast<unsigned>(ceil_div(p.batch, choice.shape.rows)), static_cast<unsigned>(p.directions));
    config.blockDim = dim3(static_cast<unsigned>(persistent_threads(p, choice.shape)));
    config.dynamicSmemBytes = static_cast<size_t>(found.shared_bytes);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = attribute_count;
    return cudaLaunchKernelEx(&config, found.kernel, args);
}

template <typename T, Cell kCell, int kRows>
cudaError_t launch_steps_of(Problem const& p, Choice const& choice, StepArgs<T> const& args, cudaStream_t stream)
{
    Device device;
    if (cudaError_t const status = device_here(device); status != cudaSuccess)
        return status;
    int64_t const items = int64_t{p.directions} * ceil_div(p.batch, kRows) * p.hidden;
    int64_t const wanted = ceil_div(items, kStepThreads / 32);
    cudaLaunchConfig_t config{};
    config.blockDim = dim3(kStepThreads);
    config.stream = stream;
    if constexpr (has_grid<T>(static_cast<int>(kCell)))
    {
        if (choice.variant == kRecurrenceGrid)
        {
            int resident = 0;
            if (cudaError_t const status
                = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, all_steps<T, kCell, kRows>, kStepThreads, 0);
                status != cudaSuccess)
                return status;
            if (resident == 0)
                return cudaErrorCooperativeLaunchTooLarge;
            cudaLaunchAttribute attribute{};
            attribute.id = cudaLaunchAttributeCooperative;
            attribute.val.cooperative = 1;
            config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(wanted, int64_t{std::min(resident, 2)} * device.multiprocessors)));
            config.attrs = &attribute;
            config.numAttrs = 1;
            return cudaLaunchKernelEx(&config, all_steps<T, kCell, kRows>, args);
        }
    }
    config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(wanted, int64_t{8} * device.multiprocessors)));
    cudaError_t status = cudaLaunchKernelEx(&config, one_step<T, kCell, kRows>, args, 0, 0);
    for (int s = 0; s < p.steps && status == cudaSuccess; ++s)
    {
        if (kCell == Cell::kGruResetFirst)
            status = cudaLaunchKernelEx(&config, one_step<T, kCell, kRows>, args, s, 1);
        if (status == cudaSuccess)
            status = cudaLaunchKernelEx(&config, one_step<T, kCell, kRows>, args, s, 2);
    }
    return status;
}

template <typename T>
cudaError_t launch_resident(Problem const& p, Choice const& choice, StepArgs<T> const& args, cudaStream_t stream)
{
    ResidentKernel<T> const kernel = find_resident<T>(choice.shape.tiles, choice.shape.slices, p.cell != static_cast<int>(Cell::kLstm));
    if (!kernel)
        return cudaErrorNotSupported;
    size_t const shared_bytes = resident_shared_bytes(p, choice);
    if (cudaError_t const status
        = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
        status != cudaSuccess)
        return status;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(p.directions * ceil_div(p.hidden, 4 * choice.shape.tiles)));
    config.blockDim = dim3(kResidentThreads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, args, choice.columns);
}

template <typename T, Cell kCell>
cudaError_t launch_steps(Problem const& p, Choice const& choice, int index, Output const& output, Places const& places,
    unsigned char* workspace, cudaStream_t stream)
{
    Layer<T> const layer = layer_of<T>(p.layer[index]);
    StepArgs<T> args{};
    args.weights = layer.weights;
    args.bias = layer.bias;
    args.h0 = layer.h0;
    args.c0 = layer.c0;
    args.h_last = layer.h_last;
    args.c_last = layer.c_last;
    args.sums = reinterpret_cast<float const*>(workspace + places.sums);
    args.h = reinterpret_cast<float*>(workspace + places.h);
    args.c = reinterpret_cast<float*>(workspace + places.c);
    args.reset = reinterpret_cast<float*>(workspace + places.reset);
    args.update = reinterpret_cast<float*>(workspace + places.update);
    args.barrier = reinterpret_cast<unsigned*>(workspace + places.barrier);
    describe<T>(args, p, output);
    args.directions = p.directions;
    if constexpr (sizeof(T) == 2 && kCell != Cell::kGruResetFirst)
    {
        if (choice.variant == kRecurrenceResident)
            return launch_resident<T>(p, choice, args, stream);
    }
    return p.batch == 1 ? launch_steps_of<T, kCell, 1>(p, choice, args, stream) : launch_steps_of<T, kCell, 8>(p, choice, args, stream);
}

template <typename T, Cell kCell>
cudaError_t launch_all(Problem const& p, Choice const& choice, unsigned char* workspace, cudaStream_t stream)
{
    Places const places = lay_out(p, choice);
    Input input{p.x, p.x_step, p.x_row, p.width};
    int const at_once = choice.wavefront ? p.layers : 1;
    for (int first = 0; first < p.layers; first += at_once)
    {
        cudaError_t status = launch_projection<T, kCell>(p, first, input, places, workspace, stream);
        if (status != cudaSuccess)
            return status;
        Output output{p.y, p.y_step, p.y_direction, p.y_row};
        if (first + at_once < p.layers)
        {
            // [steps, batch, directions, hidden]: the next layer's x.
            int64_t const row = int64_t{p.directions} * p.hidden;
            output = {workspace + places.between[first % 2], p.batch * row, p.hidden, row};
            input = {output.data, output.step, output.row, static_cast<int>(row)};
        }
        if (choice.variant != kRecurrenceIndependent && choice.variant != kRecurrenceCluster)
            status = launch_steps<T, kCell>(p, choice, first, output, places, workspace, stream);
        else if constexpr (sizeof(T) == 2 && kCell != Cell::kGruResetFirst)
            status = launch_persistent<T>(p, choice, first, at_once, output, places, workspace, stream);
        if (status != cudaSuccess)
            return status;
    }
    return cudaSuccess;
}

// No steps: the last states are the first ones.
cudaError_t pass_states(Problem const& p, cudaStream_t stream)
{
    size_t const bytes = size_t(p.directions) * p.batch * p.hidden * element(p);
    cudaError_t status = cudaSuccess;
    auto pass = [&](void* to, void const* from) {
        if (to && status == cudaSuccess)
            status = from ? cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream) : cudaMemsetAsync(to, 0, bytes, stream);
    };
    for (int i = 0; i < p.layers; ++i)
    {
        pass(p.layer[i].h_last, p.layer[i].h0);
        pass(p.layer[i].c_last, p.layer[i].c0);
    }
    return status;
}

template <typename Act>
cudaError_t with_cell(int cell, Act act)
{
    switch (static_cast<Cell>(cell))
    {
    case Cell::kLstm: return act(std::integral_constant<Cell, Cell::kLstm>{});
    case Cell::kGru: return act(std::integral_constant<Cell, Cell::kGru>{});
    case Cell::kGruResetFirst: return act(std::integral_constant<Cell, Cell::kGruResetFirst>{});
    }
    return cudaErrorInvalidValue;
}

cudaError_t choose_any(Problem const& p, Choice& choice)
{
    if (cudaError_t const status = check_sizes(p); status != cudaSuccess)
        return status;
    return with_type(p.dtype, [&](auto type) { return choose<typename decltype(type)::type>(p, choice); });
}
} // namespace
} // namespace onnxfuse

extern "C" size_t onnxfuse_recurrence_workspace(OnnxfuseRecurrence const* problem)
{
    using namespace onnxfuse;
    Choice choice;
    return problem && choose_any(*problem, choice) == cudaSuccess ? lay_out(*problem, choice).total : 0;
}

extern "C" size_t onnxfuse_recurrence_workspace_up_to(OnnxfuseRecurrence const* problem)
{
    using namespace onnxfuse;
    if (!problem)
        return 0;
    size_t most = 0;
    auto with = [&](Problem const& p) {
        Choice choice;
        if (choose_any(p, choice) != cudaSuccess)
            return;
        most = std::max(most, lay_out(p, choice).total);
        // Fewer rows may run as a wavefront where all of them do not; more rows, layer by layer where one row would not.
        if (choice.most_in_wavefront == 0)
            return;
        Problem other = p;
        choice.wavefront = !choice.wavefront;
        if (choice.wavefront)
            other.batch = choice.most_in_wavefront;
        most = std::max(most, lay_out(other, choice).total);
    };
    for (int variant = 1; variant <= kRecurrenceResident; ++variant)
    {
        // The smallest and the usual number of rows a block.
        for (int batch : {1, problem->batch})
        {
            Problem p = *problem;
            if (p.variant != kRecurrenceAutomatic && p.variant != variant)
                continue;
            p.variant = variant;
            p.batch = std::min(batch, p.batch);
            with(p);
        }
    }
    return most;
}

extern "C" int onnxfuse_recurrence_variant(OnnxfuseRecurrence const* problem)
{
    using namespace onnxfuse;
    Choice choice;
    cudaError_t const status = problem ? choose_any(*problem, choice) : cudaErrorInvalidValue;
    return status == cudaSuccess ? choice.variant : -static_cast<int>(status);
}

extern "C" int onnxfuse_launch_recurrence(OnnxfuseRecurrence const* problem, void* workspace, size_t bytes, void* stream)
{
    using namespace onnxfuse;
    if (!problem)
        return cudaErrorInvalidValue;
    Problem const& p = *problem;
    cudaError_t status = check_sizes(p);
    if (status != cudaSuccess || p.batch == 0)
        return status;
    Choice choice;
    status = choose_any(p, choice);
    if (status == cudaSuccess)
        status = check_pointers(p);
    if (status != cudaSuccess)
        return status;
    if (p.steps == 0)
        return pass_states(p, static_cast<cudaStream_t>(stream));
    if (bytes < lay_out(p, choice).total || (!workspace && bytes))
        return cudaErrorMemoryAllocation;
    if (!aligned(256, workspace))
        return cudaErrorMisalignedAddress;
    return with_type(p.dtype, [&](auto type) {
        return with_cell(p.cell, [&](auto cell) {
            return launch_all<typename decltype(type)::type, cell.value>(
                p, choice, static_cast<unsigned char*>(workspace), static_cast<cudaStream_t>(stream));
        });
    });
}
