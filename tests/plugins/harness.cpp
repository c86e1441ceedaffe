// Stands in for TensorRT: loads a plugin library and calls its creators and plugins as TensorRT does, through the header it is compiled
// with. `harness LIBRARY SCENARIO` prints one line for each expectation that is not met, and ends with status 0 if there is none.
// Refusals go to stderr, where the test reads them.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <dlfcn.h>

#include "../../plugins/abi/NvInferPluginAbi.h"

using namespace nvinfer1;

static int failures = 0;

#define EXPECT(condition)                                       \
    do                                                          \
    {                                                           \
        if (!(condition))                                       \
        {                                                       \
            std::printf("line %d: %s\n", __LINE__, #condition); \
            ++failures;                                         \
        }                                                       \
    } while (false)

// A dimension as TensorRT hands it out: an object whose implementation pointer answers.
struct Answer : apiv::VDimensionExpr
{
    explicit Answer(int64_t v)
        : value(v)
    {
    }
    bool isConstant() const override { return value >= 0; }
    int64_t getConstantValue() const override { return value; }
    bool isSizeTensor() const override { return false; }
    int64_t value;
};

struct Expression : IDimensionExpr
{
    explicit Expression(int64_t value)
        : answer(value)
    {
        mImpl = &answer;
    }
    Answer answer;
};

// -1 is an extent that is not known.
static DimsExprs symbolic(std::vector<int64_t> const& extents)
{
    DimsExprs dims{static_cast<int32_t>(extents.size()), {}};
    for (size_t i = 0; i < extents.size(); ++i)
        dims.d[i] = new Expression(extents[i]); // as long as the process
    return dims;
}

static Dims fixed(std::vector<int64_t> const& extents)
{
    Dims dims{};
    dims.nbDims = static_cast<int32_t>(extents.size());
    for (size_t i = 0; i < extents.size(); ++i)
        dims.d[i] = extents[i];
    return dims;
}

static PluginTensorDesc desc(std::vector<int64_t> const& extents, DataType type = DataType::kHALF)
{
    return {fixed(extents), type, TensorFormat::kLINEAR, 1.0f};
}

static DynamicPluginTensorDesc range(std::vector<int64_t> const& declared, std::vector<int64_t> const& largest)
{
    return {desc(declared), fixed(largest), fixed(largest), fixed(largest)};
}

struct Loaded
{
    IPluginCreatorInterface* const* creators = nullptr;
    int32_t count = 0;

    explicit Loaded(char const* path)
    {
        void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!library)
        {
            std::printf("%s\n", dlerror());
            std::exit(3);
        }
        auto* const get = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"));
        auto* const finder = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library, "setLoggerFinder"));
        finder(nullptr);
        creators = get(count);
    }

    IPluginCreatorV3One* creator(char const* name) const
    {
        for (int32_t i = 0; i < count; ++i)
        {
            auto* const found = static_cast<IPluginCreatorV3One*>(creators[i]);
            if (std::strcmp(found->getPluginName(), name) == 0)
                return found;
        }
        return nullptr;
    }

    IPluginV3* make(char const* name, std::vector<PluginField> const& fields, TensorRTPhase phase = TensorRTPhase::kBUILD) const
    {
        PluginFieldCollection const collection{static_cast<int32_t>(fields.size()), fields.data()};
        return creator(name)->createPlugin("node", &collection, phase);
    }
};

static IPluginV3OneBuild* build(IPluginV3* plugin)
{
    return static_cast<IPluginV3OneBuild*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
}
static IPluginV3OneRuntime* runtime(IPluginV3* plugin)
{
    return static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}
static IPluginV3OneCore* core(IPluginV3* plugin)
{
    return static_cast<IPluginV3OneCore*>(plugin->getCapabilityInterface(PluginCapabilityType::kCORE));
}
static bool is(InterfaceInfo const& info, char const* kind)
{
    return std::strcmp(info.kind, kind) == 0 && info.major == 1 && info.minor == 0;
}

static float const epsilon = 1e-3f;
static int32_t const zero = 0, one = 1, two = 2, three = 3;
static int64_t const long_two = 2;
static PluginField const epsilon_field{"epsilon", &epsilon, PluginFieldType::kFLOAT32, 1};

static PluginField number(char const* name, int32_t const* value)
{
    return {name, value, PluginFieldType::kINT32, 1};
}

static std::string written(PluginFieldCollection const* fields)
{
    std::string text;
    for (int32_t i = 0; i < fields->nbFields; ++i)
    {
        PluginField const& field = fields->fields[i];
        size_t const size = field.type == PluginFieldType::kCHAR ? field.length : 4 * field.length;
        text += field.name + std::string("=") + std::string(static_cast<char const*>(field.data), size) + ";";
    }
    return text;
}

static void interfaces(Loaded const& library)
{
    EXPECT(library.count == 13);
    for (char const* name : {"SkipLayerNormalization", "SkipRMSNormalization", "BiasGelu"})
    {
        IPluginCreatorV3One* const creator = library.creator(name);
        EXPECT(creator != nullptr);
        EXPECT(is(creator->getInterfaceInfo(), "PLUGIN CREATOR_V3ONE"));
        EXPECT(std::strcmp(creator->getPluginVersion(), "1") == 0);
        EXPECT(std::strcmp(creator->getPluginNamespace(), "onnxfuse") == 0);
        IPluginV3* const plugin = library.make(name, {});
        EXPECT(plugin != nullptr);
        EXPECT(is(plugin->getInterfaceInfo(), "PLUGIN"));
        EXPECT(is(core(plugin)->getInterfaceInfo(), "PLUGIN_V3ONE_CORE"));
        EXPECT(is(build(plugin)->getInterfaceInfo(), "PLUGIN_V3ONE_BUILD"));
        EXPECT(is(runtime(plugin)->getInterfaceInfo(), "PLUGIN_V3ONE_RUNTIME"));
        EXPECT(std::strcmp(core(plugin)->getPluginName(), name) == 0);
        EXPECT(std::strcmp(core(plugin)->getPluginNamespace(), "onnxfuse") == 0);
        EXPECT(build(plugin)->getNbOutputs() == 1);
        EXPECT(build(plugin)->getWorkspaceSize(nullptr, 0, nullptr, 0) == 0);
        EXPECT(build(plugin)->getNbTactics() == 0);
        EXPECT(runtime(plugin)->setTactic(0) == 0);
        delete plugin;
    }
}

static void roundtrip(Loaded const& library)
{
    struct Case
    {
        char const* name;
        std::vector<PluginField> fields;
        int outputs;
    };
    std::vector<Case> const cases{
        {"SkipLayerNormalization",
            {epsilon_field, {"outputs", &two, PluginFieldType::kINT32, 1}, {"has_beta", &zero, PluginFieldType::kINT32, 1}}, 2},
        {"SkipRMSNormalization", {epsilon_field, {"outputs", &long_two, PluginFieldType::kINT64, 1}}, 2},
        {"BiasGelu", {{"approximate", "quick", PluginFieldType::kCHAR, 5}}, 1},
    };
    for (Case const& c : cases)
    {
        IPluginV3* const first = library.make(c.name, c.fields);
        EXPECT(first != nullptr);
        std::string const state = written(runtime(first)->getFieldsToSerialize());
        std::string const key = build(first)->getTimingCacheID();
        IPluginV3* const copy = first->clone();
        IPluginV3* const attached = runtime(first)->attachToContext(nullptr);
        PluginFieldCollection const* const saved = runtime(first)->getFieldsToSerialize();
        IPluginV3* const again = library.creator(c.name)->createPlugin("node", saved, TensorRTPhase::kRUNTIME);
        EXPECT(copy != nullptr && attached != nullptr && again != nullptr && copy != first && attached != first);
        delete first; // what was made from it stands alone
        for (IPluginV3* const other : {copy, attached, again})
        {
            EXPECT(written(runtime(other)->getFieldsToSerialize()) == state);
            EXPECT(build(other)->getTimingCacheID() == key);
            EXPECT(build(other)->getNbOutputs() == c.outputs);
            delete other;
        }
        std::printf("%s", state.find("epsilon") == 0 || state == "approximate=quick;" ? "" : state.c_str());
    }
    // A whole number where a real one is declared.
    IPluginV3* const whole = library.make("SkipLayerNormalization", {{"epsilon", &one, PluginFieldType::kINT32, 1}});
    float value = 0;
    std::memcpy(&value, runtime(whole)->getFieldsToSerialize()->fields[0].data, sizeof value);
    EXPECT(value == 1.0f);
    // A string with its closing zero, and an ONNX default.
    EXPECT(library.make("BiasGelu", {{"approximate", "tanh", PluginFieldType::kCHAR, 5}}) != nullptr);
    EXPECT(written(runtime(library.make("BiasGelu", {}))->getFieldsToSerialize()) == "approximate=none;");
}

static void bad_fields(Loaded const& library)
{
    float const negative = -1.0f, nan = __builtin_nanf("");
    float const pair[2] = {1.0f, 2.0f};
    EXPECT(!library.make("SkipLayerNormalization", {{"epsilon", &negative, PluginFieldType::kFLOAT32, 1}}));
    EXPECT(!library.make("SkipLayerNormalization", {{"epsilon", &nan, PluginFieldType::kFLOAT32, 1}}));
    EXPECT(!library.make("SkipLayerNormalization", {{"epsilon", pair, PluginFieldType::kFLOAT32, 2}}));
    EXPECT(!library.make("SkipRMSNormalization", {{"epsilon", "1e-5", PluginFieldType::kCHAR, 4}}));
    EXPECT(!library.make("SkipRMSNormalization", {{"outputs", &three, PluginFieldType::kINT32, 1}}));
    EXPECT(!library.make("SkipRMSNormalization", {{"has_beta", &one, PluginFieldType::kINT32, 1}}));
    EXPECT(!library.make("BiasGelu", {{"approximate", "sigmoid", PluginFieldType::kCHAR, 7}}));
    EXPECT(!library.make("BiasGelu", {{"approximate", &one, PluginFieldType::kINT32, 1}}));
}

static int32_t shapes_status(IPluginV3* plugin, std::vector<std::vector<int64_t>> const& inputs, DimsExprs* outputs)
{
    std::vector<DimsExprs> dims;
    for (auto const& extents : inputs)
        dims.push_back(symbolic(extents));
    auto* const unused = reinterpret_cast<IExprBuilder*>(&dims);
    return build(plugin)->getOutputShapes(
        dims.data(), static_cast<int32_t>(dims.size()), nullptr, 0, outputs, build(plugin)->getNbOutputs(), *unused);
}

static void shapes(Loaded const& library)
{
    IPluginV3* const norm = library.make("SkipLayerNormalization", {{"outputs", &two, PluginFieldType::kINT32, 1}});
    DimsExprs outputs[2];
    EXPECT(shapes_status(norm, {{-1, 128, 768}, {-1, 128, 768}, {768}, {768}, {768}}, outputs) == 0);
    for (DimsExprs const& output : outputs)
        EXPECT(output.nbDims == 3 && !output.d[0]->isConstant() && output.d[2]->getConstantValue() == 768);
    EXPECT(shapes_status(norm, {{-1, -1, -1}, {-1, 128, 768}, {768}}, outputs) == 0);
    EXPECT(shapes_status(norm, {{16384}, {16384}, {16384}}, outputs) == 0);
    EXPECT(shapes_status(norm, {{4, 128, 768}, {1, 128, 768}, {768}}, outputs) != 0); // a broadcast
    EXPECT(shapes_status(norm, {{4, 128, 768}, {128, 768}, {768}}, outputs) != 0);
    EXPECT(shapes_status(norm, {{4, 768}, {4, 768}, {1, 768}}, outputs) != 0);
    EXPECT(shapes_status(norm, {{4, 768}, {4, 768}, {768}, {384}}, outputs) != 0);
    EXPECT(shapes_status(norm, {{}, {}, {1}}, outputs) != 0);
    EXPECT(shapes_status(norm, {{4, 768}, {4, 768}}, outputs) != 0);
    EXPECT(shapes_status(norm, {{4, 16385}, {4, 16385}, {16385}}, outputs) != 0);
    IPluginV3* const no_beta = library.make("SkipLayerNormalization", {{"has_beta", &zero, PluginFieldType::kINT32, 1}});
    EXPECT(shapes_status(no_beta, {{4, 768}, {4, 768}, {768}, {768}}, outputs) == 0);
    EXPECT(shapes_status(no_beta, {{4, 768}, {4, 768}, {768}, {768}, {768}}, outputs) != 0);
    IPluginV3* const gelu = library.make("BiasGelu", {});
    EXPECT(shapes_status(gelu, {{2, -1, 100000}, {100000}}, outputs) == 0);
    EXPECT(shapes_status(gelu, {{2, -1, 3072}, {768}}, outputs) != 0);
    EXPECT(shapes_status(gelu, {{2, -1, 3072}}, outputs) != 0);

    // A width that only the profile tells.
    DynamicPluginTensorDesc const wide[] = {range({-1, -1}, {8, 16385}), range({-1, -1}, {8, 16385}), range({-1}, {16385})};
    DynamicPluginTensorDesc const fits[] = {range({-1, -1}, {8, 16384}), range({-1, -1}, {8, 16384}), range({-1}, {16384})};
    EXPECT(build(norm)->configurePlugin(wide, 3, fits, 2) != 0);
    EXPECT(build(norm)->configurePlugin(fits, 3, fits, 2) == 0);
}

static void types(Loaded const& library)
{
    IPluginV3* const norm = library.make("SkipLayerNormalization", {});
    DataType out = DataType::kINT8;
    for (DataType const type : {DataType::kFLOAT, DataType::kHALF, DataType::kBF16})
    {
        DataType const same[] = {type, type, type};
        EXPECT(build(norm)->getOutputDataTypes(&out, 1, same, 3) == 0 && out == type);
        DynamicPluginTensorDesc tensors[4] = {};
        for (DynamicPluginTensorDesc& tensor : tensors)
            tensor.desc = desc({4, 768}, type);
        for (int i = 0; i < 4; ++i)
            EXPECT(build(norm)->supportsFormatCombination(i, tensors, 3, 1));
        tensors[2].desc.type = DataType::kINT32;
        EXPECT(!build(norm)->supportsFormatCombination(2, tensors, 3, 1));
        tensors[3].desc.format = static_cast<TensorFormat>(1);
        EXPECT(!build(norm)->supportsFormatCombination(3, tensors, 3, 1));
    }
    DataType const mixed[] = {DataType::kHALF, DataType::kHALF, DataType::kFLOAT};
    EXPECT(build(norm)->getOutputDataTypes(&out, 1, mixed, 3) != 0);
    DataType const whole[] = {DataType::kINT32, DataType::kINT32, DataType::kINT32};
    EXPECT(build(norm)->getOutputDataTypes(&out, 1, whole, 3) != 0);
}

static void running(Loaded const& library)
{
    IPluginV3* const norm = library.make("SkipLayerNormalization", {});
    PluginTensorDesc const empty[] = {desc({0, 128, 768}), desc({0, 128, 768}), desc({768})};
    PluginTensorDesc const full[] = {desc({2, 128, 768}), desc({2, 128, 768}), desc({768})};
    PluginTensorDesc const broadcast[] = {desc({2, 128, 768}), desc({1, 128, 768}), desc({768})};
    void const* const inputs[3] = {};
    void* const outputs[1] = {};
    EXPECT(runtime(norm)->enqueue(empty, empty, inputs, outputs, nullptr, nullptr) != 0); // no shapes yet
    EXPECT(runtime(norm)->onShapeChange(broadcast, 3, broadcast, 1) != 0);
    EXPECT(runtime(norm)->onShapeChange(empty, 3, empty, 1) == 0);
    EXPECT(runtime(norm)->enqueue(empty, empty, inputs, outputs, nullptr, nullptr) == 0); // nothing to do, no GPU needed
    EXPECT(runtime(norm)->onShapeChange(full, 3, full, 1) == 0);
    EXPECT(runtime(norm)->enqueue(full, full, inputs, outputs, nullptr, nullptr) != 0); // null pointers
}

// Answers with dimensions as TensorRT makes them.
struct Maker : apiv::VExprBuilder
{
    IDimensionExpr const* constant(int64_t value) override { return new Expression(value); }
    IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& first, IDimensionExpr const& second) override
    {
        if (!first.isConstant() || !second.isConstant())
            return new Expression(-1);
        int64_t const a = first.getConstantValue(), b = second.getConstantValue();
        switch (op)
        {
        case DimensionOperation::kPROD: return new Expression(a * b);
        case DimensionOperation::kFLOOR_DIV: return new Expression(a / b);
        default: return nullptr;
        }
    }
    IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) override { return nullptr; }
};

struct Builder : IExprBuilder
{
    Builder() { mImpl = &maker; }
    Maker maker;
};

static std::vector<int64_t> extents(DimsExprs const& dims)
{
    std::vector<int64_t> found;
    for (int32_t i = 0; i < dims.nbDims; ++i)
        found.push_back(dims.d[i]->isConstant() ? dims.d[i]->getConstantValue() : -1);
    return found;
}

// The outputs' extents; none where the plugin refuses the inputs.
static std::vector<std::vector<int64_t>> outputs_of(IPluginV3* plugin, std::vector<std::vector<int64_t>> const& inputs)
{
    std::vector<DimsExprs> dims;
    for (auto const& given : inputs)
        dims.push_back(symbolic(given));
    std::vector<DimsExprs> outputs(static_cast<size_t>(build(plugin)->getNbOutputs()));
    Builder builder;
    int32_t const status = build(plugin)->getOutputShapes(
        dims.data(), static_cast<int32_t>(dims.size()), nullptr, 0, outputs.data(), static_cast<int32_t>(outputs.size()), builder);
    std::vector<std::vector<int64_t>> found;
    for (size_t i = 0; status == 0 && i < outputs.size(); ++i)
        found.push_back(extents(outputs[i]));
    return found;
}

// A clone, and the plugin that its serialized fields make, are the same again.
static void comes_back(Loaded const& library, IPluginV3* first)
{
    PluginFieldCollection const* const saved = runtime(first)->getFieldsToSerialize();
    IPluginV3* const again = library.creator(core(first)->getPluginName())->createPlugin("node", saved, TensorRTPhase::kRUNTIME);
    for (IPluginV3* const other : {first->clone(), again})
    {
        EXPECT(other != nullptr && written(runtime(other)->getFieldsToSerialize()) == written(saved));
        EXPECT(std::strcmp(build(other)->getTimingCacheID(), build(first)->getTimingCacheID()) == 0);
    }
}

static void recurrence(Loaded const& library)
{
    static int32_t const hidden = 64, wrong = 20, batch_first[] = {1, 0, 2}, y_batch_first[] = {2, 0, 1, 3}, y_plain[] = {0, 1, 2, 3};
    PluginField const size = number("hidden_size", &hidden);
    PluginField const both{"direction", "bidirectional", PluginFieldType::kCHAR, 13};
    using Extents = std::vector<std::vector<int64_t>>;
    // Two layers, both directions, batch first, lengths and the second layer's states.
    IPluginV3* const stack = library.make("LSTMSequence",
        {size, both, number("layers", &two), {"x_perm", batch_first, PluginFieldType::kINT32, 3},
            {"y_perm", y_batch_first, PluginFieldType::kINT32, 4}, number("has_b1", &one), number("has_lengths", &one),
            number("has_h2", &one), number("has_c2", &one)});
    EXPECT(stack != nullptr && build(stack)->getNbOutputs() == 5);
    Extents given{{-1, -1, 24}, {2, 256, 24}, {2, 256, 64}, {2, 512}, {2, 256, 128}, {2, 256, 64}, {-1}, {2, -1, 64}, {2, -1, 64}};
    EXPECT((outputs_of(stack, given) == Extents{{-1, -1, 128}, {2, -1, 64}, {2, -1, 64}, {2, -1, 64}, {2, -1, 64}}));
    given[0] = {3, 7, 24};
    given[7] = {2, 3, 64};
    EXPECT((outputs_of(stack, given)[0] == std::vector<int64_t>{3, 7, 128}));
    given[7] = {2, 4, 64}; // another batch
    EXPECT(outputs_of(stack, given).empty());
    given[7] = {2, 3, 64};
    given[4] = {2, 256, 64}; // the second layer takes both directions of the first
    EXPECT(outputs_of(stack, given).empty());
    given.pop_back();
    EXPECT(outputs_of(stack, given).empty());

    // One layer of a GRU, Y as ONNX has it.
    IPluginV3* const layer
        = library.make("GRUSequence", {size, number("joined", &zero), {"y_perm", y_plain, PluginFieldType::kINT32, 4}, number("outputs", &one)});
    EXPECT(layer != nullptr && build(layer)->getNbOutputs() == 1);
    EXPECT((outputs_of(layer, {{7, -1, 24}, {1, 192, 24}, {1, 192, 64}}) == Extents{{7, 1, -1, 64}}));

    DataType const half = DataType::kHALF, whole = DataType::kINT32;
    DataType kinds[9] = {half, half, half, half, half, half, whole, half, half}, out[5];
    EXPECT(build(stack)->getOutputDataTypes(out, 5, kinds, 9) == 0 && out[0] == half && out[4] == half);
    kinds[6] = half;
    EXPECT(build(stack)->getOutputDataTypes(out, 5, kinds, 9) != 0);
    DynamicPluginTensorDesc tensors[14] = {};
    for (int i = 0; i < 14; ++i)
        tensors[i].desc = desc({1}, i == 6 ? whole : half);
    for (int i = 0; i < 14; ++i)
        EXPECT(build(stack)->supportsFormatCombination(i, tensors, 9, 5));
    tensors[6].desc.type = half;
    EXPECT(!build(stack)->supportsFormatCombination(6, tensors, 9, 5));

    // Without a batch there is nothing to do, and no GPU is asked.
    PluginTensorDesc const none[] = {desc({7, 0, 24}), desc({1, 192, 24}), desc({1, 192, 64})};
    void const* const inputs[3] = {};
    void* const outputs[1] = {};
    EXPECT(runtime(layer)->onShapeChange(none, 3, none, 1) == 0);
    EXPECT(runtime(layer)->enqueue(none, none, inputs, outputs, nullptr, nullptr) == 0);

    for (IPluginV3* const first : {stack, layer})
        comes_back(library, first);

    EXPECT(!library.make("LSTMSequence", {}));
    EXPECT(!library.make("LSTMSequence", {number("hidden_size", &wrong)}));
    EXPECT(!library.make("LSTMSequence", {size, {"direction", "backward", PluginFieldType::kCHAR, 8}}));
    EXPECT(!library.make("LSTMSequence", {size, {"x_perm", batch_first, PluginFieldType::kINT32, 2}}));
    EXPECT(!library.make("LSTMSequence", {size, {"y_perm", y_plain, PluginFieldType::kINT32, 4}}));
    EXPECT(!library.make("GRUSequence", {size, number("has_c1", &one)}));
}

static void attention(Loaded const& library)
{
    using Extents = std::vector<std::vector<int64_t>>;
    static int32_t const twelve = 12, four = 4, many = 64, y_rows[] = {0, 2, 1, 3}, heads_first[] = {0, 1, 2, 3}, other[] = {0, 3, 1, 2}, widths[] = {768, 256, 256};
    PluginField const heads = number("heads", &twelve), groups = number("kv_heads", &four);
    IPluginV3* const masked = library.make("FusedAttention",
        {heads, groups, number("added", &two), number("kept", &one), {"k_perm", heads_first, PluginFieldType::kINT32, 4},
            {"y_perm", heads_first, PluginFieldType::kINT32, 4}});
    EXPECT(masked != nullptr && build(masked)->getNbOutputs() == 1);
    Extents given{{-1, -1, 12, 64}, {-1, 4, 77, 64}, {-1, 77, 4, 48}, {12, -1, 77}, {-1, 1, 1, 77}, {1, 1, -1, 1}};
    EXPECT((outputs_of(masked, given) == Extents{{-1, 12, -1, 48}}));
    given[0] = {4, 30, 12, 64};
    given[4] = {2, 1, 1, 77}; // used twice
    EXPECT((outputs_of(masked, given) == Extents{{4, 12, 30, 48}}));
    given[4] = {3, 1, 1, 77};
    EXPECT(outputs_of(masked, given).empty());
    given[4] = {4, 1, 1, 76};
    EXPECT(outputs_of(masked, given).empty());
    given[4] = {4, 1, 1, 77};
    given[1] = {4, 12, 77, 64};
    EXPECT(outputs_of(masked, given).empty());
    given.pop_back();
    EXPECT(outputs_of(masked, given).empty());

    IPluginV3* const packed
        = library.make("FusedAttention", {heads, groups, number("packed", &one), {"widths", widths, PluginFieldType::kINT32, 3}});
    EXPECT((outputs_of(packed, {{-1, 128, 1280}}) == Extents{{-1, 128, 12, 64}}));
    EXPECT((outputs_of(packed, {{2, -1, 5, 256}}) == Extents{{2, -1, 12, 64}}));
    EXPECT(outputs_of(packed, {{-1, 128, 1281}}).empty());

    DataType const half = DataType::kHALF, truth = DataType::kBOOL;
    DataType kinds[6] = {half, half, half, half, half, truth}, out[1];
    EXPECT(build(masked)->getOutputDataTypes(out, 1, kinds, 6) == 0 && out[0] == half);
    kinds[5] = half;
    EXPECT(build(masked)->getOutputDataTypes(out, 1, kinds, 6) != 0);
    DynamicPluginTensorDesc tensors[7] = {};
    for (int i = 0; i < 7; ++i)
        tensors[i].desc = desc({1}, i == 5 ? truth : half);
    for (int i = 0; i < 7; ++i)
        EXPECT(build(masked)->supportsFormatCombination(i, tensors, 6, 1));
    tensors[5].desc.type = half;
    EXPECT(!build(masked)->supportsFormatCombination(5, tensors, 6, 1));

    // Without a batch there is nothing to do, and no GPU is asked.
    PluginTensorDesc const none[] = {desc({0, 128, 1280})};
    void const* const inputs[1] = {};
    void* const outputs[1] = {};
    EXPECT(runtime(packed)->onShapeChange(none, 1, none, 1) == 0);
    EXPECT(runtime(packed)->enqueue(none, none, inputs, outputs, nullptr, nullptr) == 0);

    IPluginV3* const rotary = library.make("FusedRotary", {number("rotary", &many), number("interleaved", &one), {"x_perm", y_rows, PluginFieldType::kINT32, 4}});
    EXPECT((outputs_of(rotary, {{-1, 7, 12, 80}, {7, 64}, {1, 1, 7, 64}}) == Extents{{-1, 12, 7, 80}}));
    EXPECT(outputs_of(rotary, {{-1, 7, 12, 80}, {8, 64}, {7, 64}}).empty());
    EXPECT(outputs_of(rotary, {{-1, 7, 12, 48}, {7, 64}, {7, 64}}).empty());
    PluginTensorDesc const nothing[] = {desc({0, 7, 12, 80}), desc({7, 64}), desc({7, 64})};
    EXPECT(runtime(rotary)->enqueue(nothing, none, inputs, outputs, nullptr, nullptr) == 0);

    for (IPluginV3* const first : {masked, packed, rotary})
        comes_back(library, first);
    EXPECT(!library.make("FusedAttention", {}));
    EXPECT(!library.make("FusedAttention", {heads, number("packed", &one)}));
    EXPECT(!library.make("FusedAttention", {heads, {"v_perm", other, PluginFieldType::kINT32, 4}}));
    EXPECT(!library.make("FusedRotary", {number("rotary", &many), {"x_perm", other, PluginFieldType::kINT32, 4}}));
}

static IPluginV3* elementwise(Loaded const& library, std::string const& layout, std::string const& code = "f0VMRg==")
{
    PluginField const fields[] = {{"layout", layout.data(), PluginFieldType::kCHAR, static_cast<int32_t>(layout.size())},
        {"code", code.data(), PluginFieldType::kCHAR, static_cast<int32_t>(code.size())}};
    return library.make("Elementwise", {fields[0], fields[1]});
}

// Fields of a generated kernel: two inputs of [N, C, H, W], one of them a value for each channel; the sum and its mean over the last axis.
static std::string const kMean = "1;name=abc123;rank=4;vector=8;each=1;end=kept;groups=1,1,1,1;in=h1111,h0100;out=he,hr";

static void generated(Loaded const& library)
{
    Builder builder;
    IPluginV3* const plugin = elementwise(library, kMean);
    EXPECT(plugin != nullptr);
    IPluginV3* const copy = plugin->clone();
    IPluginV3* const again = library.creator("Elementwise")->createPlugin(
        "node", runtime(plugin)->getFieldsToSerialize(), TensorRTPhase::kRUNTIME);
    std::string const key = build(plugin)->getTimingCacheID();
    delete plugin;
    for (IPluginV3* const one : {copy, again})
    {
        EXPECT(std::strcmp(core(one)->getPluginName(), "Elementwise") == 0);
        EXPECT(is(runtime(one)->getInterfaceInfo(), "PLUGIN_V3ONE_RUNTIME"));
        EXPECT(key == build(one)->getTimingCacheID());
        EXPECT(written(runtime(one)->getFieldsToSerialize()) == "layout=" + kMean + ";code=f0VMRg==;");
        EXPECT(build(one)->getNbOutputs() == 2);
        DataType const types[] = {DataType::kHALF, DataType::kHALF};
        DataType made[2] = {};
        EXPECT(build(one)->getOutputDataTypes(made, 2, types, 2) == 0 && made[0] == DataType::kHALF && made[1] == DataType::kHALF);
        DimsExprs const dims[] = {symbolic({-1, 6, 4, 8}), symbolic({1, 6, 1, 1})};
        DimsExprs outputs[2] = {};
        EXPECT(build(one)->getOutputShapes(dims, 2, nullptr, 0, outputs, 2, builder) == 0);
        EXPECT(outputs[0].nbDims == 4 && outputs[0].d[0] == dims[0].d[0] && outputs[0].d[3]->getConstantValue() == 8);
        EXPECT(outputs[1].nbDims == 4 && outputs[1].d[2]->getConstantValue() == 4 && outputs[1].d[3]->getConstantValue() == 1);
        DynamicPluginTensorDesc const tensors[] = {range({-1, 6, 4, 8}, {2, 6, 4, 8}), range({1, 6, 1, 1}, {1, 6, 1, 1}),
            range({-1, 6, 4, 8}, {2, 6, 4, 8}), range({-1, 6, 4, 1}, {2, 6, 4, 1})};
        for (int i = 0; i < 4; ++i)
            EXPECT(build(one)->supportsFormatCombination(i, tensors, 2, 2));
        EXPECT(build(one)->configurePlugin(tensors, 2, tensors + 2, 2) == 0);
    }
    std::string const dropped = "1;name=0;rank=2;vector=4;each=2;end=dropped;groups=1,1;in=f11;out=fr";
    DimsExprs const matrix[] = {symbolic({5, -1})};
    DimsExprs vector[1] = {};
    EXPECT(build(elementwise(library, dropped))->getOutputShapes(matrix, 1, nullptr, 0, vector, 1, builder) == 0);
    EXPECT(vector[0].nbDims == 1 && vector[0].d[0]->getConstantValue() == 5);
}

static void generated_refusals(Loaded const& library)
{
    Builder builder;
    IPluginV3* const plugin = elementwise(library, kMean);
    DataType const types[] = {DataType::kHALF, DataType::kFLOAT};
    DataType made[2] = {};
    EXPECT(build(plugin)->getOutputDataTypes(made, 2, types, 2) != 0);
    DimsExprs const wrong[] = {symbolic({2, 6, 4, 8}), symbolic({1, 5, 1, 1})}, few[] = {symbolic({2, 6, 4, 8}), symbolic({6})};
    DimsExprs outputs[2] = {};
    EXPECT(build(plugin)->getOutputShapes(wrong, 2, nullptr, 0, outputs, 2, builder) != 0);
    EXPECT(build(plugin)->getOutputShapes(few, 2, nullptr, 0, outputs, 2, builder) != 0);
    EXPECT(build(plugin)->getOutputShapes(wrong, 1, nullptr, 0, outputs, 2, builder) != 0);
    DynamicPluginTensorDesc const huge[] = {range({-1, 6, -1, 8}, {65536, 6, 65536, 8}), range({1, 6, 1, 1}, {1, 6, 1, 1})};
    EXPECT(build(plugin)->configurePlugin(huge, 2, huge, 2) != 0);
    DynamicPluginTensorDesc tensors[] = {range({2, 6, 4, 8}, {2, 6, 4, 8}), range({1, 6, 1, 1}, {1, 6, 1, 1})};
    tensors[0].desc.type = DataType::kFLOAT;
    EXPECT(!build(plugin)->supportsFormatCombination(0, tensors, 2, 0));
    PluginTensorDesc const shapes[] = {desc({2, 6, 4, 8}), desc({1, 6, 1, 1})};
    void const* const inputs[2] = {};
    void* const results[2] = {};
    EXPECT(runtime(plugin)->enqueue(shapes, shapes, inputs, results, nullptr, nullptr) != 0); // no shapes yet
    EXPECT(!library.make("Elementwise", {}));
    for (char const* layout : {"", "2;name=0;rank=1;vector=4;each=1;end=none;groups=1;in=f1;out=fe",
             "1;name=0;rank=9;vector=4;each=1;end=none;groups=9;in=f1;out=fe", "1;name=../x;rank=1;vector=4;each=1;end=none;groups=1;in=f1;out=fe",
             "1;name=0;rank=2;vector=4;each=1;end=none;groups=1;in=f11;out=fe", "1;name=0;rank=1;vector=4;each=1;end=none;groups=1;in=f0;out=fe",
             "1;name=0;rank=1;vector=4;each=1;end=none;groups=1;in=f1;out=fr", "1;name=0;rank=1;vector=4;each=1;end=none;groups=1;in=z1;out=fe"})
        EXPECT(!elementwise(library, layout));
    EXPECT(!elementwise(library, kMean, ""));
}

// Depthwise convolution + LayerNorm, GroupNorm + SiLU, products with an epilogue.
static void epilogues(Loaded const& library)
{
    static int32_t const four = 4, wrong = 0;
    PluginField const gelu{"activation", "gelu", PluginFieldType::kCHAR, 4};
    IPluginV3* const planar = library.make("DepthwiseConvLayerNorm", {epsilon_field});
    IPluginV3* const last = library.make("DepthwiseConvLayerNorm", {number("channels_last", &one)});
    IPluginV3* const norm = library.make("GroupNormSilu", {number("num_groups", &four)});
    IPluginV3* const film = library.make("GroupNormSilu", {epsilon_field, number("num_groups", &four), number("film", &one)});
    IPluginV3* const product = library.make("Linear", {gelu});
    IPluginV3* const residual = library.make("Linear", {number("residual", &one)});
    IPluginV3* const gated = library.make("Linear", {{"activation", "silu", PluginFieldType::kCHAR, 4}, number("gated", &one)});
    IPluginV3* const summed = library.make("Linear", {number("residual", &one), number("norm", &one), number("outputs", &two), epsilon_field});
    EXPECT(planar && last && norm && film && product && residual && gated && summed);

    auto shape_of = [](IPluginV3* plugin, std::vector<std::vector<int64_t>> const& inputs) {
        std::vector<std::vector<int64_t>> const outputs = outputs_of(plugin, inputs);
        return outputs.empty() ? std::vector<int64_t>{} : outputs.back(); // all are of one shape
    };
    using Extents = std::vector<int64_t>;
    EXPECT((shape_of(planar, {{-1, 96, 56, -1}, {96, 1, 7, 7}, {96}, {96}, {96}}) == Extents{-1, 56, -1, 96}));
    EXPECT((shape_of(last, {{-1, 56, 57, 96}, {96, 1, 7, 7}, {96}, {96}, {96}}) == Extents{-1, 56, 57, 96}));
    EXPECT(shape_of(planar, {{1, 96, 56, 56}, {96, 1, 7, 7}, {96}, {96}}).empty());
    EXPECT(shape_of(planar, {{1, 96, 56, 56}, {96, 1, 9, 9}, {96}, {96}, {96}}).empty());
    EXPECT(shape_of(planar, {{1, 100, 56, 56}, {100, 1, 7, 7}, {100}, {100}, {100}}).empty());
    EXPECT(shape_of(planar, {{1, 96, 56, 56}, {96, 1, 7, 7}, {96}, {48}, {96}}).empty());
    EXPECT((shape_of(norm, {{-1, 32, 8, 9}, {32}, {32}}) == Extents{-1, 32, 8, 9}));
    EXPECT((shape_of(film, {{2, 32, 8, 9}, {32}, {32}, {2, 32, 1, 1}, {2, 32, 1, 1}}) == Extents{2, 32, 8, 9}));
    EXPECT(shape_of(film, {{2, 32, 8, 9}, {32}, {32}, {2, 32, 8, 9}, {2, 32, 1, 1}}).empty());
    EXPECT(shape_of(film, {{2, 32, 8, 9}, {32}, {32}}).empty());
    EXPECT(shape_of(norm, {{2, 30, 8, 9}, {30}, {30}}).empty());
    EXPECT((shape_of(product, {{2, -1, 96}, {96, 384}, {384}}) == Extents{2, -1, 384}));
    EXPECT((shape_of(residual, {{7, 384}, {384, 96}, {96}, {96}, {7, 96}}) == Extents{7, 96}));
    EXPECT(shape_of(product, {{2, 49, 96}, {96, 100}, {100}}).empty());
    EXPECT(shape_of(product, {{2, 49, 96}, {192, 384}, {384}}).empty());
    EXPECT(shape_of(residual, {{7, 384}, {384, 96}, {96}, {96}, {1, 96}}).empty());
    EXPECT((shape_of(gated, {{2, -1, 96}, {96, 384}, {384}}) == Extents{2, -1, 192}));
    EXPECT(shape_of(gated, {{2, 49, 96}, {96, 200}, {200}}).empty());
    EXPECT((shape_of(summed, {{7, 384}, {384, 96}, {96}, {96}, {7, 96}, {96}, {96}}) == Extents{7, 96}));
    EXPECT(shape_of(summed, {{7, 384}, {384, 96}, {96}, {96}, {7, 96}}).empty());
    EXPECT(shape_of(summed, {{7, 384}, {384, 264}, {264}, {264}, {7, 264}, {264}, {264}}).empty());
    EXPECT(shape_of(summed, {{7, 384}, {384, 96}, {96}, {96}, {7, 96}, {96}, {48}}).empty());
    EXPECT(build(gated)->getNbOutputs() == 1 && build(summed)->getNbOutputs() == 2);

    DataType const single[] = {DataType::kFLOAT, DataType::kFLOAT, DataType::kFLOAT};
    DataType out = DataType::kINT8;
    EXPECT(build(norm)->getOutputDataTypes(&out, 1, single, 3) == 0 && out == DataType::kFLOAT);
    EXPECT(build(product)->getOutputDataTypes(&out, 1, single, 3) != 0);

    // Channels in groups of 8 behind the pixels are taken where a kernel of channels last takes them.
    DynamicPluginTensorDesc tensors[6] = {};
    for (DynamicPluginTensorDesc& tensor : tensors)
        tensor.desc = desc({2, 32, 8, 9});
    for (int i = 0; i < 6; ++i)
        EXPECT(build(planar)->supportsFormatCombination(i, tensors, 5, 1));
    tensors[0].desc.format = TensorFormat::kHWC8;
    EXPECT(build(planar)->supportsFormatCombination(0, tensors, 5, 1));
    EXPECT(!build(last)->supportsFormatCombination(0, tensors, 5, 1));
    EXPECT(!build(product)->supportsFormatCombination(0, tensors, 3, 1));
    EXPECT(build(norm)->supportsFormatCombination(0, tensors, 3, 1));
    EXPECT(!build(norm)->supportsFormatCombination(3, tensors, 3, 1)); // the output is as the input
    tensors[3].desc.format = TensorFormat::kHWC8;
    EXPECT(build(norm)->supportsFormatCombination(3, tensors, 3, 1));
    tensors[0].desc.type = DataType::kFLOAT;
    EXPECT(!build(norm)->supportsFormatCombination(0, tensors, 3, 1));
    EXPECT(build(planar)->getNbTactics() == 0); // of no shape yet

    // Parts of all groups, for any tactic; nothing else needs memory.
    DynamicPluginTensorDesc const many[] = {range({-1, 32, -1, -1}, {8, 32, 64, 64}), range({32}, {32}), range({32}, {32})};
    EXPECT(build(norm)->getWorkspaceSize(many, 3, many, 1) >= 8u * 4u * 8u);
    EXPECT(build(product)->getWorkspaceSize(many, 3, many, 1) == 0);

    // Without a batch there is nothing to do, and no GPU is asked; with one, pointers are.
    void const* const inputs[5] = {};
    void* const outputs[1] = {};
    struct Run
    {
        IPluginV3* plugin;
        std::vector<PluginTensorDesc> given; // of no images, or rows
    };
    std::vector<Run> const runs{{planar, {desc({0, 96, 7, 7}), desc({96, 1, 7, 7}), desc({96}), desc({96}), desc({96})}},
        {norm, {desc({0, 32, 8, 9}), desc({32}), desc({32})}}, {product, {desc({0, 96}), desc({96, 384}), desc({384})}}};
    for (Run const& run : runs)
    {
        std::vector<PluginTensorDesc> given = run.given;
        int32_t const count = static_cast<int32_t>(given.size());
        EXPECT(runtime(run.plugin)->onShapeChange(given.data(), count, given.data(), 1) == 0);
        EXPECT(runtime(run.plugin)->enqueue(given.data(), given.data(), inputs, outputs, nullptr, nullptr) == 0);
        given[0].dims.d[0] = 1;
        EXPECT(runtime(run.plugin)->enqueue(given.data(), given.data(), inputs, outputs, nullptr, nullptr) != 0);
    }

    for (IPluginV3* const first : {planar, last, norm, film, product, residual, gated, summed})
        comes_back(library, first);

    EXPECT(!library.make("DepthwiseConvLayerNorm", {number("channels_last", &two)}));
    EXPECT(!library.make("GroupNormSilu", {number("num_groups", &wrong)}));
    EXPECT(!library.make("Linear", {{"activation", "elu", PluginFieldType::kCHAR, 3}}));
    EXPECT(!library.make("Linear", {number("groups", &one)}));
    EXPECT(!library.make("Linear", {number("gated", &one), number("residual", &one)}));
    EXPECT(!library.make("Linear", {number("norm", &one)}));
    EXPECT(!library.make("Linear", {number("residual", &one), number("outputs", &two)}));
}

// The norm that writes patches.
static void patches(Loaded const& library)
{
    static int32_t const four = 4;
    IPluginV3* const plain = library.make("LayerNormPatches", {epsilon_field, number("patch", &two)});
    IPluginV3* const planes = library.make("LayerNormPatches", {number("channels_first", &one)});
    IPluginV3* const both = library.make("LayerNormPatches", {number("patch", &four), number("channels_first", &one)});
    EXPECT(plain && planes && both);

    using Extents = std::vector<std::vector<int64_t>>;
    EXPECT((outputs_of(plain, {{-1, 56, 57, 96}, {96}, {96}}) == Extents{{-1, 28, 28, 384}}));
    EXPECT((outputs_of(plain, {{2, -1, 9, 96}, {96}, {96}}) == Extents{{2, -1, 4, 384}}));
    EXPECT((outputs_of(planes, {{-1, 96, 56, 57}, {96}, {96}}) == Extents{{-1, 56, 57, 96}}));
    EXPECT((outputs_of(both, {{1, 3, 224, 230}, {3}, {3}}) == Extents{{1, 56, 57, 48}}));
    EXPECT(outputs_of(plain, {{1, 8, 8, 96}, {96}}).empty());
    EXPECT(outputs_of(plain, {{1, 8, 96}, {96}, {96}}).empty());
    EXPECT(outputs_of(plain, {{1, 8, 8, 96}, {96}, {48}}).empty());
    EXPECT(outputs_of(planes, {{1, 96, 8, 8}, {8}, {8}}).empty());
    EXPECT(outputs_of(plain, {{1, 8, 8, 16385}, {16385}, {16385}}).empty());
    EXPECT(outputs_of(planes, {{1, 512, 8, 8}, {512}, {512}}).empty());

    // Channels in groups of 8 behind the pixels are taken for planes, where they are a multiple of 8.
    DynamicPluginTensorDesc tensors[4] = {};
    for (DynamicPluginTensorDesc& tensor : tensors)
        tensor.desc = desc({2, 96, 8, 9});
    for (int i = 0; i < 4; ++i)
        EXPECT(build(planes)->supportsFormatCombination(i, tensors, 3, 1) && build(plain)->supportsFormatCombination(i, tensors, 3, 1));
    tensors[0].desc.format = tensors[3].desc.format = TensorFormat::kHWC8;
    EXPECT(build(planes)->supportsFormatCombination(0, tensors, 3, 1));
    EXPECT(!build(planes)->supportsFormatCombination(3, tensors, 3, 1));
    EXPECT(!build(plain)->supportsFormatCombination(0, tensors, 3, 1));
    tensors[0].desc = desc({2, 6, 8, 9});
    tensors[0].desc.format = TensorFormat::kHWC8;
    EXPECT(!build(both)->supportsFormatCombination(0, tensors, 3, 1));
    tensors[0].desc = desc({2, 96, 8, 9}, DataType::kFLOAT);
    tensors[0].desc.format = TensorFormat::kHWC8;
    EXPECT(!build(planes)->supportsFormatCombination(0, tensors, 3, 1));

    // Without a batch there is nothing to do, and no GPU is asked; with one, pointers are.
    void const* const inputs[3] = {};
    void* const outputs[1] = {};
    PluginTensorDesc given[] = {desc({0, 8, 8, 96}), desc({96}), desc({96})};
    EXPECT(runtime(plain)->onShapeChange(given, 3, given, 1) == 0);
    EXPECT(runtime(plain)->enqueue(given, given, inputs, outputs, nullptr, nullptr) == 0);
    given[0].dims.d[0] = 1;
    EXPECT(runtime(plain)->enqueue(given, given, inputs, outputs, nullptr, nullptr) != 0);

    for (IPluginV3* const first : {plain, planes, both})
        comes_back(library, first);

    EXPECT(!library.make("LayerNormPatches", {number("patch", &zero)}));
    EXPECT(!library.make("LayerNormPatches", {number("channels_first", &two)}));
}

int main(int, char** argv)
{
    Loaded const library(argv[1]);
    std::string const scenario = argv[2];
    if (scenario == "interfaces")
        interfaces(library);
    else if (scenario == "roundtrip")
        roundtrip(library);
    else if (scenario == "bad_fields")
        bad_fields(library);
    else if (scenario == "shapes")
        shapes(library);
    else if (scenario == "types")
        types(library);
    else if (scenario == "running")
        running(library);
    else if (scenario == "generated")
        generated(library);
    else if (scenario == "generated_refusals")
        generated_refusals(library);
    else if (scenario == "recurrence")
        recurrence(library);
    else if (scenario == "attention")
        attention(library);
    else if (scenario == "epilogues")
        epilogues(library);
    else if (scenario == "patches")
        patches(library);
    else
        return 2;
    return failures ? 1 : 0;
}
