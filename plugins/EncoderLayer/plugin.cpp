// EncoderStack: consecutive layers of a transformer encoder in one launch.
//
// Inputs: x [batch, sequence, width], weights [layers, elements] in the type of x, vectors [layers, elements] float32, both as launch.h has
// them; then, post-norm, final [2, width] float32 (gamma and beta of the norm behind the last layer); then, with has_mask, mask [batch or 1,
// heads or 1, sequence or 1, sequence] in the type of x, added to the scores. Output: as x.
//
// An engine carries kernels compiled for the shapes that it is built for ("1x128"); other shapes, and GPUs that such a kernel was not
// compiled for, take the general kernel of this library.
#include <algorithm>
#include <cmath>

#include "../Elementwise/driver.h"
#include "../common/plugin.h"
#include "launch.h"

namespace onnxfuse
{
using nvinfer1::DataType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

class EncoderStack final : public Node<EncoderStack>
{
public:
    static constexpr char const* kName = "EncoderStack";

    static std::vector<PluginField> const& fields()
    {
        static std::vector<PluginField> const known = [] {
            std::vector<PluginField> all;
            for (char const* name : {"heads", "inner", "pre_norm", "first_norm", "activation", "has_mask"})
                all.push_back({name, nullptr, PluginFieldType::kINT32, 1});
            for (char const* name : {"epsilon", "scale"})
                all.push_back({name, nullptr, PluginFieldType::kFLOAT32, 1});
            for (char const* name : {"shapes", "code"})
                all.push_back({name, nullptr, PluginFieldType::kCHAR, 1});
            return all;
        }();
        return known;
    }

    explicit EncoderStack(Fields const& fields)
        : heads_(fields.integer("heads", 0, 1, 1024))
        , inner_(fields.integer("inner", 0, 64, 8192))
        , before_(fields.integer("pre_norm", 0, 0, 1))
        , first_norm_(fields.integer("first_norm", before_, 0, 1))
        , activation_(fields.integer("activation", 0, 0, 2))
        , has_mask_(fields.integer("has_mask", 0, 0, 1))
        , epsilon_(checked_epsilon(fields))
        , scale_(fields.number("scale", 0.0f))
        , shapes_(fields.text("shapes", ""))
        , code_(std::make_shared<std::string const>(fields.text("code", "")))
    {
        if (!std::isfinite(scale_))
            refuse("field 'scale' is %g; it must be finite", static_cast<double>(scale_));
        if (shapes_.empty() != code_->empty())
            refuse("fields 'shapes' and 'code' go together; build the engine again");
    }

    int outputs() const
    {
        return 1;
    }
    std::string key() const
    {
        return std::string("onnxfuse 1 ") + kName + " heads=" + std::to_string(heads_) + " inner=" + std::to_string(inner_) + " pre_norm="
            + std::to_string(before_) + " first_norm=" + std::to_string(first_norm_) + " activation=" + std::to_string(activation_) + " mask=" + std::to_string(has_mask_)
            + " shapes=" + shapes_;
    }
    std::vector<PluginField> state() const
    {
        return {state_field("heads", heads_), state_field("inner", inner_), state_field("pre_norm", before_), state_field("first_norm", first_norm_),
            state_field("activation", activation_), state_field("has_mask", has_mask_), state_field("epsilon", epsilon_), state_field("scale", scale_),
            state_field("shapes", shapes_), state_field("code", *code_)};
    }

    // --- building --------------------------------------------------------------------------------------------------------

    int32_t getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes, int32_t nbInputs) const noexcept override
    {
        return status([&] {
            if (!is_half(inputTypes[0]))
                refuse("x is neither float16 nor bfloat16; leave this node to TensorRT");
            for (int32_t i = 1; i < nbInputs; ++i)
            {
                if (inputTypes[i] != type_of(i, inputTypes[0]))
                    refuse("input %d is not of the type that it must have", i);
            }
            std::fill(outputTypes, outputTypes + nbOutputs, inputTypes[0]);
        });
    }
    bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs, int32_t) noexcept override
    {
        DataType const first = inOut[0].desc.type;
        return inOut[pos].desc.format == nvinfer1::TensorFormat::kLINEAR && is_half(first)
            && inOut[pos].desc.type == (pos < nbInputs ? type_of(pos, first) : first);
    }
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs, nvinfer1::DynamicPluginTensorDesc const*,
        int32_t) noexcept override
    {
        return status([&] {
            check(shapes_of(in, nbInputs));
            for (nvinfer1::Dims const* x : {&in[0].opt, &in[0].max})
            {
                OnnxfuseEncoder const problem = sized(in[0].desc.type, *x, in[1].opt);
                if (onnxfuse_encoder_workspace(&problem) == 0)
                    refuse("%s are not taken on this GPU; leave this node to TensorRT", shape_of(*x).text().c_str());
            }
        });
    }
    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* in, int32_t, nvinfer1::DynamicPluginTensorDesc const*,
        int32_t) const noexcept override
    {
        size_t most = 0;
        accepted(kName, [&] {
            OnnxfuseEncoder const problem = sized(in[0].desc.type, in[0].max, in[1].max);
            most = onnxfuse_encoder_workspace_up_to(&problem);
            for (nvinfer1::Dims const* x : {&in[0].min, &in[0].opt, &in[0].max})
            {
                OnnxfuseEncoder const compiled = encoder::as_compiled(sized(in[0].desc.type, *x, in[1].max));
                most = std::max(most, onnxfuse_encoder_workspace(&compiled));
            }
        });
        return most;
    }

    // --- running ---------------------------------------------------------------------------------------------------------

    int32_t onShapeChange(
        nvinfer1::PluginTensorDesc const* in, int32_t nbInputs, nvinfer1::PluginTensorDesc const*, int32_t) noexcept override
    {
        return status([&] {
            check(shapes_of(in, nbInputs));
            choose(sized(in[0].type, in[0].dims, in[1].dims));
        });
    }
    int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const*, void const* const* inputs,
        void* const* outputs, void* workspace, cudaStream_t stream) noexcept override
    {
        return status([&] {
            OnnxfuseEncoder problem = sized(inputDesc[0].type, inputDesc[0].dims, inputDesc[1].dims);
            if (problem.batch == 0 || problem.sequence == 0)
                return;
            problem.x = inputs[0];
            problem.weights = inputs[1];
            problem.vectors = static_cast<float const*>(inputs[2]);
            problem.y = outputs[0];
            if (!before_)
            {
                problem.final_gamma = static_cast<float const*>(inputs[3]);
                problem.final_beta = problem.final_gamma + problem.width;
            }
            if (has_mask_)
            {
                // [batch or 1, heads or 1, rows or 1, keys]
                nvinfer1::Dims const& dims = inputDesc[mask_at()].dims;
                problem.mask = inputs[mask_at()];
                problem.mask_type = 1;
                problem.mask_row = dims.d[2] == 1 ? 0 : dims.d[3];
                problem.mask_head = dims.d[1] == 1 ? 0 : dims.d[2] * dims.d[3];
                problem.mask_batch = dims.d[0] == 1 ? 0 : dims.d[1] * dims.d[2] * dims.d[3];
            }
            if (!kernel_.empty())
            {
                launch_compiled(problem, workspace, stream);
                return;
            }
            size_t const bytes = onnxfuse_encoder_workspace(&problem);
            int const failed = onnxfuse_launch_encoder(&problem, workspace, bytes, stream);
            if (failed)
                refuse("the kernel did not start: %s", onnxfuse_launch_error(failed));
        });
    }

    // Refuses shapes; extents of -1 are unknown.
    void check(std::vector<Shape> const& inputs) const
    {
        if (static_cast<int>(inputs.size()) != inputs_count())
            refuse("%zu inputs; its fields tell of %d", inputs.size(), inputs_count());
        if (inputs[0].rank() != 3)
            refuse("x has rank %d; it must be [batch, sequence, width]", inputs[0].rank());
        int64_t const width = inputs[0].last();
        if (width < 64 || width > 1024 || width % 64 != 0 || width % heads_ != 0)
            refuse("x is %lld wide; it must be a multiple of 64 up to 1024, and of the %d heads", static_cast<long long>(width), heads_);
        for (int i : {1, 2})
        {
            if (inputs[i].rank() != 2 || inputs[i].extents[0] < 1 || inputs[i].extents[0] != inputs[1].extents[0])
                refuse("%s has shape %s; it must hold one row for each layer", i == 1 ? "weights" : "vectors", inputs[i].text().c_str());
        }
        // Every part is a multiple of 256 bytes: the width and the inner width are multiples of 64.
        check_same("weights", inputs[1], "layers, elements", {{inputs[1].extents[0], 4 * width * width + 2 * width * inner_}});
        auto vector = [](int64_t n) { return (3 * n + 63) / 64 * 64; };
        check_same("vectors", inputs[2], "layers, elements", {{inputs[1].extents[0], vector(3 * width) + 2 * vector(width) + vector(inner_)}});
        if (!before_)
            check_same("final", inputs[3], "2, width", {{2, width}});
        if (!has_mask_)
            return;
        Shape const& mask = inputs[mask_at()];
        int64_t const wanted[4] = {inputs[0].extents[0], heads_, inputs[0].extents[1], inputs[0].extents[1]};
        bool fits = mask.rank() == 4;
        for (int i = 0; fits && i < 4; ++i)
        {
            int64_t const extent = mask.extents[i];
            fits = extent < 0 || wanted[i] < 0 || extent == wanted[i] || (extent == 1 && i < 3);
        }
        if (!fits)
            refuse("mask has shape %s; it must be [batch or 1, heads or 1, sequence or 1, sequence] of x", mask.text().c_str());
    }

private:
    // Loads the kernel for this shape, where the engine has one and this GPU takes it. Not in enqueue, which may be captured into a graph.
    void choose(OnnxfuseEncoder const& problem)
    {
        kernel_.clear();
        std::string const shape = std::to_string(problem.batch) + "x" + std::to_string(problem.sequence);
        if (("," + shapes_ + ",").find("," + shape + ",") == std::string::npos)
            return;
        encoder::Launch planned;
        if (encoder::plan_compiled(encoder::as_compiled(problem), planned) != 0)
            return; // fewer multiprocessors, or less shared memory
        if (!module_)
            module_ = Module::of(decoded(*code_));
        clusters_ = {planned.blocks, planned.threads, planned.cluster, planned.shared};
        if (module_->prepare("encode_" + shape, clusters_) * planned.cluster >= planned.blocks)
            kernel_ = "encode_" + shape;
    }
    void launch_compiled(OnnxfuseEncoder const& general, void* workspace, cudaStream_t stream) const
    {
        OnnxfuseEncoder const problem = encoder::as_compiled(general);
        encoder::Launch launch;
        int const failed = encoder::prepare_compiled(problem, workspace, onnxfuse_encoder_workspace(&problem), stream, launch);
        if (failed)
            refuse("the kernel did not start: %s", onnxfuse_launch_error(failed));
        module_->launch(kernel_, clusters_, launch.argument.data(), stream);
    }

    int mask_at() const
    {
        return before_ ? 3 : 4;
    }
    int inputs_count() const
    {
        return mask_at() + has_mask_;
    }
    DataType type_of(int input, DataType x) const
    {
        return input == 2 || (input == 3 && !before_) ? DataType::kFLOAT : x;
    }

    // The problem of these shapes, without its tensors. x: of x; weights: of the weights.
    OnnxfuseEncoder sized(DataType type, nvinfer1::Dims const& x, nvinfer1::Dims const& weights) const
    {
        OnnxfuseEncoder p{};
        p.dtype = static_cast<int>(dtype_of(type));
        p.layers = static_cast<int32_t>(weights.d[0]);
        p.batch = static_cast<int32_t>(std::min<int64_t>(x.d[0], INT32_MAX));
        p.sequence = static_cast<int32_t>(std::min<int64_t>(x.d[1], INT32_MAX));
        p.width = static_cast<int32_t>(x.d[2]);
        p.inner = inner_;
        p.heads = heads_;
        p.pre_norm = before_;
        p.first_norm = first_norm_;
        p.activation = activation_;
        p.epsilon = epsilon_;
        p.scale = scale_;
        static float const none = 0.0f;
        if (!before_)
            p.final_gamma = p.final_beta = &none; // that there is one; enqueue knows where
        return p;
    }

    int32_t heads_, inner_, before_, first_norm_, activation_, has_mask_;
    float epsilon_, scale_;
    std::string shapes_;                      // "BxS,..." that have a kernel of their own
    std::shared_ptr<std::string const> code_; // base64; clones share it
    std::shared_ptr<Module> module_;
    std::string kernel_; // for the present shape; empty: the general one
    ClusterLaunch clusters_{};
};

static Registration<EncoderStack> const registration;
} // namespace onnxfuse
