// LayerNormPatches: inputs X [N, H, W, C], Scale [C], Offset [C]. Output [N, H / p, W / p, p p C].
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
        static std::vector<nvinfer1::PluginField> const known{
            {"epsilon", nullptr, PluginFieldType::kFLOAT32, 1}, {"patch", nullptr, PluginFieldType::kINT32, 1}};
        return known;
    }

    explicit LayerNormPatches(Fields const& fields)
        : epsilon_(checked_epsilon(fields))
        , patch_(fields.integer("patch", 1, 1, kMostPatch))
    {
    }

    int outputs() const
    {
        return 1;
    }
    std::vector<nvinfer1::PluginField> state() const
    {
        return {state_field("epsilon", epsilon_), state_field("patch", patch_)};
    }
    std::string key() const
    {
        return "onnxfuse 1 LayerNormPatches patch=" + std::to_string(patch_);
    }

    static std::vector<Problem> const& tactics()
    {
        static std::vector<Problem> const all = [] {
            std::vector<Problem> made;
            for (int const threads : {0, 32, 64, 96, 128, 256})
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
            for (int const side : {1, 2})
                outputs[0].d[side] = builder.operation(DimensionOperation::kFLOOR_DIV, *inputs[0].d[side], *builder.constant(patch_));
            outputs[0].d[3] = builder.operation(DimensionOperation::kPROD, *inputs[0].d[3], *builder.constant(int64_t{patch_} * patch_));
        });
    }
    void check(std::vector<Shape> const& inputs) const
    {
        if (inputs.size() != 3)
            refuse("%zu inputs; it takes 3", inputs.size());
        if (inputs[0].rank() != 4)
            refuse("X has shape %s; it must have rank 4", inputs[0].text().c_str());
        check_width(inputs[0], kMaxWidth);
        check_per_column("Scale", inputs[1], inputs[0].last());
        check_per_column("Offset", inputs[2], inputs[0].last());
    }
    Problem sized(nvinfer1::PluginTensorDesc const* inputs) const
    {
        nvinfer1::Dims const& x = inputs[0].dims;
        Problem p{};
        p.dtype = static_cast<int>(dtype_of(inputs[0].type));
        p.images = extent(x.d[0], "the batch");
        p.height = extent(x.d[1], "the height");
        p.width = extent(x.d[2], "the width");
        p.channels = extent(x.d[3], "the number of channels");
        p.patch = patch_;
        p.epsilon = epsilon_;
        return p;
    }
    void place(Problem& p, void const* const* inputs, void* const* outputs) const
    {
        p.input = inputs[0], p.gamma = inputs[1], p.beta = inputs[2], p.output = outputs[0];
    }

private:
    static constexpr int32_t kMostPatch = 256;

    float epsilon_;
    int32_t patch_;
};

static Registration<LayerNormPatches> const registration;
} // namespace onnxfuse
