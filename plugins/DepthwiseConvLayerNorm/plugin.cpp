// DepthwiseConvLayerNorm: inputs X [N, C, H, W] or, with channels_last, [N, H, W, C]; W [C, 1, K, K]; B, Scale, Offset [C]. Output [N, H, W, C].
#include "../common/tactics.h"
#include "launch.h"

namespace onnxfuse
{
class DepthwiseConvLayerNorm final : public Tuned<DepthwiseConvLayerNorm>
{
public:
    using Problem = OnnxfuseDepthwise;
    static constexpr char const* kName = "DepthwiseConvLayerNorm";

    static std::vector<nvinfer1::PluginField> const& fields()
    {
        static std::vector<nvinfer1::PluginField> const known{{"epsilon", nullptr, nvinfer1::PluginFieldType::kFLOAT32, 1},
            {"channels_last", nullptr, nvinfer1::PluginFieldType::kINT32, 1}};
        return known;
    }

    explicit DepthwiseConvLayerNorm(Fields const& fields)
        : epsilon_(checked_epsilon(fields))
        , channels_last_(fields.integer("channels_last", 0, 0, 1))
    {
    }

    int outputs() const
    {
        return 1;
    }
    std::vector<nvinfer1::PluginField> state() const
    {
        return {state_field("epsilon", epsilon_), state_field("channels_last", channels_last_)};
    }
    std::string key() const
    {
        return "onnxfuse 1 DepthwiseConvLayerNorm channels_last=" + std::to_string(channels_last_);
    }

    static std::vector<Problem> const& tactics()
    {
        static std::vector<Problem> const all = [] {
            constexpr int kHow[][5] = {{5, 1, 1, 7, 3}, {5, 1, 1, 7, 4}, {5, 1, 1, 4, 3}, {5, 2, 1, 4, 1}, {5, 2, 1, 4, 2}, {5, 2, 1, 4, 3}, {5, 4, 1, 4, 1},
                {5, 4, 1, 4, 2}, {5, 4, 1, 4, 3}, {5, 4, 1, 4, 4}, {5, 1, 1, 4, 6}, {5, 1, 1, 4, 8}, {5, 2, 1, 4, 4}, {5, 2, 1, 4, 6}, {5, 1, 1, 2, 6}, {5, 1, 1, 2, 8},
                {5, 1, 1, 2, 12}, {5, 1, 1, 2, 16}, {5, 2, 1, 2, 1}, {5, 2, 1, 2, 6}, {5, 2, 1, 2, 8}, {5, 1, 1, 1, 12}, {5, 1, 1, 1, 16}, {5, 1, 2, 1, 6}, {5, 1, 2, 1, 8},
                {5, 1, 2, 1, 12}, {1, 4, 1, 1, 1}, {1, 4, 1, 2, 1}, {1, 2, 1, 1, 4}, {1, 1, 1, 1, 8}};
            std::vector<Problem> made;
            for (auto const& how : kHow)
            {
                Problem p{};
                p.variant = how[0], p.rows = how[1], p.strip = how[2], p.strips = how[3], p.split = how[4];
                made.push_back(p);
            }
            return made;
        }();
        return all;
    }
    static void use(Problem& p, Problem const& tactic)
    {
        p.variant = tactic.variant, p.rows = tactic.rows, p.strip = tactic.strip, p.strips = tactic.strips, p.split = tactic.split;
    }
    static int supported(Problem const& p)
    {
        return onnxfuse_depthwise_layernorm_supported(&p);
    }
    static int launch(Problem const& p, void*, cudaStream_t stream)
    {
        return onnxfuse_launch_depthwise_layernorm(&p, stream);
    }

    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const*, int32_t,
        nvinfer1::DimsExprs* outputs, int32_t, nvinfer1::IExprBuilder&) noexcept override
    {
        return status([&] {
            check(shapes_of(inputs, nbInputs));
            outputs[0] = inputs[0];
            if (!channels_last_)
            {
                outputs[0].d[1] = inputs[0].d[2];
                outputs[0].d[2] = inputs[0].d[3];
                outputs[0].d[3] = inputs[0].d[1];
            }
        });
    }
    bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t, int32_t) noexcept override
    {
        using nvinfer1::TensorFormat;
        nvinfer1::PluginTensorDesc const& desc = inOut[pos].desc;
        // Channels in groups of 8 behind the pixels are channels last where they are a multiple of 8.
        bool const last = pos == 0 && !channels_last_ && desc.format == TensorFormat::kHWC8 && is_half(desc.type);
        return is_float(desc.type) && desc.type == inOut[0].desc.type && (desc.format == TensorFormat::kLINEAR || last);
    }
    void check(std::vector<Shape> const& inputs) const
    {
        if (inputs.size() != 5)
            refuse("%zu inputs; it takes 5", inputs.size());
        if (inputs[0].rank() != 4 || inputs[1].rank() != 4)
            refuse("X has shape %s and W %s; both must have rank 4", inputs[0].text().c_str(), inputs[1].text().c_str());
        int64_t const channels = inputs[0].extents[static_cast<size_t>(channel_axis())], kernel = inputs[1].last();
        check_same("W", inputs[1], "channels, 1, kernel, kernel", {{channels, 1, kernel, kernel}});
        if (kernel >= 0 && kernel != 3 && kernel != 5 && kernel != 7)
            refuse("the kernel is %lld wide; it must be 3, 5 or 7; leave this node to TensorRT", static_cast<long long>(kernel));
        if (channels >= 0 && channels % 8 != 0)
            refuse("X has %lld channels; they must be a multiple of 8; leave this node to TensorRT", static_cast<long long>(channels));
        constexpr char const* kNames[] = {"B", "Scale", "Offset"};
        for (size_t i = 2; i < 5; ++i)
            check_per_column(kNames[i - 2], inputs[i], channels);
    }
    Problem sized(nvinfer1::PluginTensorDesc const* inputs) const
    {
        nvinfer1::Dims const &x = inputs[0].dims, &w = inputs[1].dims;
        Problem p{};
        p.dtype = static_cast<int>(dtype_of(inputs[0].type));
        p.kernel = extent(w.d[3], "the kernel");
        p.images = extent(x.d[0], "the batch");
        p.height = extent(x.d[channels_last_ ? 1 : 2], "the height");
        p.width = extent(x.d[channels_last_ ? 2 : 3], "the width");
        p.channels = extent(x.d[channel_axis()], "the number of channels");
        p.planar = !channels_last_ && inputs[0].format == nvinfer1::TensorFormat::kLINEAR;
        p.epsilon = epsilon_;
        return p;
    }
    void place(Problem& p, void const* const* inputs, void* const* outputs) const
    {
        p.input = inputs[0], p.weight = inputs[1], p.bias = inputs[2], p.gamma = inputs[3], p.beta = inputs[4], p.output = outputs[0];
    }

private:
    int channel_axis() const
    {
        return channels_last_ ? 3 : 1;
    }

    float epsilon_;
    int32_t channels_last_;
};

static Registration<DepthwiseConvLayerNorm> const registration;
} // namespace onnxfuse
