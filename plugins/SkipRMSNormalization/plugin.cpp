// SkipRMSNormalization: inputs input, skip, gamma, bias?; outputs output, sum?.
#include "../common/norm_plugin.h"
#include "launch.h"

namespace onnxfuse
{
class SkipRMSNormalization final : public Plugin<SkipRMSNormalization>
{
public:
    static constexpr char const* kName = "SkipRMSNormalization";
    static constexpr int64_t kMaxWidth = onnxfuse::kMaxWidth;

    // outputs: 1, or 2 with the sum.
    static std::vector<nvinfer1::PluginField> const& fields()
    {
        using nvinfer1::PluginFieldType;
        static std::vector<nvinfer1::PluginField> const known{
            {"epsilon", nullptr, PluginFieldType::kFLOAT32, 1}, {"outputs", nullptr, PluginFieldType::kINT32, 1}};
        return known;
    }

    explicit SkipRMSNormalization(Fields const& fields)
        : epsilon_(checked_epsilon(fields))
        , outputs_(fields.integer("outputs", 1, 1, 2))
    {
    }

    void check(std::vector<Shape> const& inputs) const
    {
        check_norm(inputs, 3, {"gamma", "bias"});
    }

    int outputs() const
    {
        return outputs_;
    }

    int launch(int dtype, Tensors const& tensors, int64_t rows, int64_t width, cudaStream_t stream) const
    {
        return onnxfuse_launch_skip_rmsnorm(dtype, tensors.input(0), tensors.input(1), tensors.input(2), tensors.input(3),
            tensors.output(0), tensors.output(1), rows, width, epsilon_, 0, stream);
    }

    std::vector<nvinfer1::PluginField> state() const
    {
        using nvinfer1::PluginFieldType;
        return {{"epsilon", &epsilon_, PluginFieldType::kFLOAT32, 1}, {"outputs", &outputs_, PluginFieldType::kINT32, 1}};
    }

    std::string key() const
    {
        return "onnxfuse 1 SkipRMSNormalization outputs=" + std::to_string(outputs_);
    }

private:
    float epsilon_;
    int32_t outputs_;
};

static Registration<SkipRMSNormalization> const registration;
} // namespace onnxfuse
