// SkipLayerNormalization: inputs input, skip, gamma, beta?, bias?; outputs output, sum?.
#include "../common/norm_plugin.h"
#include "launch.h"

namespace onnxfuse
{
class SkipLayerNormalization final : public Plugin<SkipLayerNormalization>
{
public:
    static constexpr char const* kName = "SkipLayerNormalization";
    static constexpr int64_t kMaxWidth = onnxfuse::kMaxWidth;

    // outputs: 1, or 2 with the sum. has_beta: 0 where input 3 is the bias, because the beta before it is absent.
    static std::vector<nvinfer1::PluginField> const& fields()
    {
        using nvinfer1::PluginFieldType;
        static std::vector<nvinfer1::PluginField> const known{{"epsilon", nullptr, PluginFieldType::kFLOAT32, 1},
            {"outputs", nullptr, PluginFieldType::kINT32, 1}, {"has_beta", nullptr, PluginFieldType::kINT32, 1}};
        return known;
    }

    explicit SkipLayerNormalization(Fields const& fields)
        : epsilon_(checked_epsilon(fields))
        , outputs_(fields.integer("outputs", 1, 1, 2))
        , has_beta_(fields.integer("has_beta", 1, 0, 1))
    {
    }

    void check(std::vector<Shape> const& inputs) const
    {
        if (has_beta_)
            check_norm(inputs, 3, {"gamma", "beta", "bias"});
        else
            check_norm(inputs, 3, {"gamma", "bias"});
    }

    int outputs() const
    {
        return outputs_;
    }

    int launch(int dtype, Tensors const& tensors, int64_t rows, int64_t width, cudaStream_t stream) const
    {
        void const* const beta = has_beta_ ? tensors.input(3) : nullptr;
        void const* const bias = tensors.input(has_beta_ ? 4 : 3);
        return onnxfuse_launch_skip_layernorm(dtype, tensors.input(0), tensors.input(1), tensors.input(2), beta, bias,
            tensors.output(0), tensors.output(1), rows, width, epsilon_, 0, stream);
    }

    std::vector<nvinfer1::PluginField> state() const
    {
        using nvinfer1::PluginFieldType;
        return {{"epsilon", &epsilon_, PluginFieldType::kFLOAT32, 1}, {"outputs", &outputs_, PluginFieldType::kINT32, 1},
            {"has_beta", &has_beta_, PluginFieldType::kINT32, 1}};
    }

    std::string key() const
    {
        return "onnxfuse 1 SkipLayerNormalization outputs=" + std::to_string(outputs_);
    }

private:
    float epsilon_;
    int32_t outputs_;
    int32_t has_beta_;
};

static Registration<SkipLayerNormalization> const registration;
} // namespace onnxfuse
