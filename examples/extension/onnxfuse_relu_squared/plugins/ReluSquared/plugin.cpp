// ReluSquared: input X; output Y.
#include "common/plugin.h"
#include "launch.h"

namespace onnxfuse
{
class ReluSquared final : public Plugin<ReluSquared>
{
public:
    static constexpr char const* kName = "ReluSquared";
    static constexpr int64_t kMaxWidth = INT64_MAX;

    static std::vector<nvinfer1::PluginField> const& fields()
    {
        static std::vector<nvinfer1::PluginField> const known;
        return known;
    }

    explicit ReluSquared(Fields const&) {}

    void check(std::vector<Shape> const& inputs) const
    {
        if (inputs.size() != 1)
            refuse("%zu inputs; it takes 1", inputs.size());
        check_rank("X", inputs[0], 1);
    }

    int outputs() const
    {
        return 1;
    }

    int launch(int dtype, Tensors const& tensors, int64_t rows, int64_t width, cudaStream_t stream) const
    {
        return onnxfuse_launch_relu_squared(dtype, tensors.input(0), tensors.output(0), rows * width, stream);
    }

    std::vector<nvinfer1::PluginField> state() const
    {
        return {};
    }

    std::string key() const
    {
        return "onnxfuse 1 ReluSquared";
    }
};

static Registration<ReluSquared> const registration;
} // namespace onnxfuse
