// LayerNormPatches: inputs X [N, H, W, C] or, with channels_first, [N, C, H, W], Scale [C], Offset [C]. Output [N, H / p, W / p, p p C].
#include "../common/tactics.h"
#include "launch.h"

namespace onnxfuse
{
class LayerNormPatches final : public Tuned<LayerNormPatches>
{
public:
    using Problem = OnnxfuseLayerNormPatches;
    static constexpr char const* kName = "LayerNormPatches";

    static std::vector<nvinfer1::PluginField> const& fields()
    {
        using nvinfer1::PluginFieldType;
        static std::vector<nvinfer1::PluginField> const known{{"epsilon", nullptr, PluginFieldType::kFLOAT32, 1},
            {"patch", nullptr, PluginFieldType::kINT32, 1}, {"channels_first", nullptr, PluginFieldType::kINT32, 1}};
        return known;
    }

    explicit LayerNormPatches(Fields const& fields)
        : epsilon_(checked_epsilon(fields))
        , patch_(fields.integer("patch", 1, 1, kMostPatch))
        , channels_first_(fields.integer("channels_first", 0, 0, 1))
    {
    }

    int outputs() const
    {
        return 1;
    }
    std::vector<nvinfer1::PluginField> state() const
    {
        return {state_field("epsilon", epsilon_), state_field("patch", patch_), state_field("channels_first", channels_first_)};
    }
    std::string key() const
    {
        return "onnxfuse 1 LayerNormPatches patch=" + std::to_string(patch_) + " channels_first=" + std::to_string(channels_first_);
    }

    static std::vector<Problem> const& tactics()
    {
        static std::vector<Problem> const all = [] {
            std::vector<Problem> made;
            for (int const threads : {0, 32, 64, 96, 128, 256, 512})
            {
                made.push_back({});
                made.back().threads = threads;
            }
            return made;
        }();
        return all;
    }
    static void use(Problem& p, Problem const& tactic)
    {
        p.threads = tactic.threads;
    }
    static int supported(Problem const& p)
    {
        return onnxfuse_layernorm_patches_supported(&p);
    }
    static int launch(Problem const& p, void*, cudaStream_t stream)
    {
        return onnxfuse_launch_layernorm_patches(&p, stream);
    }

    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const*, int32_t,
        nvinfer1::DimsExprs* outputs, int32_t, nvinfer1::IExprBuilder& builder) noexcept override
    {
        return status([&] {
            using nvinfer1::DimensionOperation;
            check(shapes_of(inputs, nbInputs));
            outputs[0] = inputs[0];
            for (int const side : {0, 1})
            {
                nvinfer1::IDimensionExpr const& whole = *inputs[0].d[height_axis() + side];
                outputs[0].d[1 + side] = builder.operation(DimensionOperation::kFLOOR_DIV, whole, *builder.constant(patch_));
            }
            outputs[0].d[3] = builder.operation(DimensionOperation::kPROD, *inputs[0].d[channel_axis()], *builder.constant(int64_t{patch_} * patch_));
        });
    }
    bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t, int32_t) noexcept override
    {
        using nvinfer1::TensorFormat;
        nvinfer1::PluginTensorDesc const& desc = inOut[pos].desc;
        // Channels in groups of 8 behind the pixels are channels last where they are a multiple of 8.
        bool const grouped = pos == 0 && channels_first_ && desc.format == TensorFormat::kHWC8 && is_half(desc.type) && desc.dims.nbDims == 4
            && desc.dims.d[1] > 0 && desc.dims.d[1] % 8 == 0;
        return is_float(desc.type) && desc.type == inOut[0].desc.type && (desc.format == TensorFormat::kLINEAR || grouped);
    }
    void check(std::vector<Shape> const& inputs) const
    {
        if (inputs.size() != 3)
            refuse("%zu inputs; it takes 3", inputs.size());
        if (inputs[0].rank() != 4)
            refuse("X has shape %s; it must have rank 4", inputs[0].text().c_str());
        int64_t const channels = inputs[0].extents[static_cast<size_t>(channel_axis())];
        if (channels > most_channels())
            refuse("X has %lld channels and the kernel takes up to %d; leave this node to TensorRT", static_cast<long long>(channels), most_channels());
        check_per_column("Scale", inputs[1], channels);
        check_per_column("Offset", inputs[2], channels);
    }
    Problem sized(nvinfer1::PluginTensorDesc const* inputs) const
    {
        nvinfer1::Dims const& x = inputs[0].dims;
        Problem p{};
        p.dtype = static_cast<int>(dtype_of(inputs[0].type));
        p.images = extent(x.d[0], "the batch");
        p.height = extent(x.d[height_axis()], "the height");
        p.width = extent(x.d[height_axis() + 1], "the width");
        p.channels = extent(x.d[channel_axis()], "the number of channels");
        p.patch = patch_;
        p.planar = channels_first_ && inputs[0].format == nvinfer1::TensorFormat::kLINEAR;
        p.epsilon = epsilon_;
        return p;
    }
    void place(Problem& p, void const* const* inputs, void* const* outputs) const
    {
        p.input = inputs[0], p.gamma = inputs[1], p.beta = inputs[2], p.output = outputs[0];
    }

private:
    static constexpr int32_t kMostPatch = 256;
    static constexpr int kMostPlanes = 504; // of which a tile of float32 fits the 64 KB of shared memory that every GPU gives a block

    int channel_axis() const
    {
        return channels_first_ ? 1 : 3;
    }
    int height_axis() const
    {
        return channels_first_ ? 2 : 1;
    }
    int most_channels() const
    {
        return channels_first_ ? kMostPlanes : static_cast<int>(kMaxWidth);
    }

    float epsilon_;
    int32_t patch_;
    int32_t channels_first_;
};

static Registration<LayerNormPatches> const registration;
} // namespace onnxfuse
