// BiasGelu: inputs X, bias; output Y.
#include "../common/plugin.h"
#include "launch.h"

namespace onnxfuse
{
class BiasGelu final : public Plugin<BiasGelu>
{
public:
    static constexpr char const* kName = "BiasGelu";
    static constexpr int64_t kMaxWidth = INT64_MAX;

    // approximate: "none" (erf), "tanh" or "quick".
    static std::vector<nvinfer1::PluginField> const& fields()
    {
        static std::vector<nvinfer1::PluginField> const known{
            {"approximate", nullptr, nvinfer1::PluginFieldType::kCHAR, 1}};
        return known;
    }

    explicit BiasGelu(Fields const& fields)
        : approximate_(fields.text("approximate", "none"))
        , kind_(kind_of(approximate_))
    {
    }

    void check(std::vector<Shape> const& inputs) const
    {
        if (inputs.size() != 2)
            refuse("%zu inputs; it takes 2", inputs.size());
        check_rank("X", inputs[0], 1);
        check_per_column("bias", inputs[1], inputs[0].last());
    }

    int outputs() const
    {
        return 1;
    }

    int launch(int dtype, Tensors const& tensors, int64_t rows, int64_t width, cudaStream_t stream) const
    {
        return onnxfuse_launch_bias_gelu(dtype, static_cast<int>(kind_), tensors.input(0), tensors.input(1), tensors.output(0),
            rows, width, stream);
    }

    std::vector<nvinfer1::PluginField> state() const
    {
        return {{"approximate", approximate_.c_str(), nvinfer1::PluginFieldType::kCHAR,
            static_cast<int32_t>(approximate_.size())}};
    }

    std::string key() const
    {
        return "onnxfuse 1 BiasGelu approximate=" + approximate_;
    }

private:
    static GeluKind kind_of(std::string const& approximate)
    {
        if (approximate == "none")
            return GeluKind::kErf;
        if (approximate == "tanh")
            return GeluKind::kTanh;
        if (approximate == "quick")
            return GeluKind::kQuick;
        refuse("field 'approximate' is '%s'; it must be none, tanh or quick", approximate.c_str());
    }

    std::string approximate_;
    GeluKind kind_;
};

static Registration<BiasGelu> const registration;
} // namespace onnxfuse
