// Linear: inputs X [..., k], W [k, n], bias [n] and, with residual, scale [n] and residual [..., n]; with norm, gamma and beta [n] behind them.
// Outputs: Y [..., n], gated [..., n / 2]; with norm the sum that was normalised, too, where it is read.
#include "../common/tactics.h"
#include "launch.h"

namespace onnxfuse
{
class Linear final : public Tuned<Linear>
{
public:
    using Problem = OnnxfuseLinear;
    static constexpr char const* kName = "Linear";

    // gated: columns of W and bias in groups of 8, what opens and what passes. norm: with residual alone. outputs: 1, or with norm 2.
    // activation: "none", "relu", "silu", "gelu", "gelu_tanh" or "gelu_quick".
    static std::vector<nvinfer1::PluginField> const& fields()
    {
        static std::vector<nvinfer1::PluginField> const known{{"activation", nullptr, nvinfer1::PluginFieldType::kCHAR, 1},
            {"residual", nullptr, nvinfer1::PluginFieldType::kINT32, 1}, {"gated", nullptr, nvinfer1::PluginFieldType::kINT32, 1},
            {"norm", nullptr, nvinfer1::PluginFieldType::kINT32, 1}, {"epsilon", nullptr, nvinfer1::PluginFieldType::kFLOAT32, 1},
            {"outputs", nullptr, nvinfer1::PluginFieldType::kINT32, 1}};
        return known;
    }

    explicit Linear(Fields const& fields)
        : activation_(fields.text("activation", "none"))
        , residual_(fields.integer("residual", 0, 0, 1))
        , gated_(fields.integer("gated", 0, 0, 1))
        , norm_(fields.integer("norm", 0, 0, 1))
        , epsilon_(checked_epsilon(fields))
        , outputs_(fields.integer("outputs", 1, 1, 2))
        , kind_(kind_of(activation_))
    {
        if ((gated_ && residual_) || (norm_ && !residual_) || (outputs_ == 2 && !norm_))
            refuse("fields residual, gated, norm and outputs are %d, %d, %d and %d, which do not go together", residual_, gated_, norm_, outputs_);
    }

    int outputs() const
    {
        return outputs_;
    }
    std::vector<nvinfer1::PluginField> state() const
    {
        return {state_field("activation", activation_), state_field("residual", residual_), state_field("gated", gated_), state_field("norm", norm_),
            state_field("epsilon", epsilon_), state_field("outputs", outputs_)};
    }
    std::string key() const
    {
        return "onnxfuse 2 Linear activation=" + activation_ + " residual=" + std::to_string(residual_) + " gated=" + std::to_string(gated_)
            + " norm=" + std::to_string(norm_) + " outputs=" + std::to_string(outputs_);
    }

    static std::vector<Problem> const& tactics()
    {
        static std::vector<Problem> const all = [] {
            std::vector<Problem> made;
            auto const add = [&](int rows, int columns, int stages, int split, int hopper) {
                Problem p{};
                p.tile_rows = rows, p.tile_columns = columns, p.stages = stages, p.split = split, p.hopper = hopper;
                made.push_back(p);
            };
            for (int const split : {1, 2, 4, 8})
            {
                add(64, 64, 0, split, 1);
                add(32, 64, 4, split, 0);
                add(64, 64, 4, split, 0);
            }
            add(64, 64, 3, 1, 0);
            add(128, 128, 3, 1, 0);
            add(128, 128, 0, 1, 1);
            add(128, 256, 0, 1, 1);
            // Whole rows, for the norm.
            for (int const split : {1, 2, 4, 8})
            {
                add(32, 128, 3, split, 0);
                add(64, 128, 3, split, 0);
                add(32, 256, 2, split, 0);
                add(32, 256, 3, split, 0);
            }
            return made;
        }();
        return all;
    }
    static void use(Problem& p, Problem const& tactic)
    {
        p.tile_rows = tactic.tile_rows, p.tile_columns = tactic.tile_columns, p.stages = tactic.stages, p.split = tactic.split, p.hopper = tactic.hopper;
    }
    static int supported(Problem const& p)
    {
        return onnxfuse_linear_supported(&p);
    }
    // Where the launcher has a measured rule, that for Hopper. Beside an H200 it takes 8 to 12 us to enqueue this plugin once. The rates are
    // those of small products there: 49 x 768 x 3072 takes 6.8 us, 3136 x 96 x 384 5.4, 6272 x 192 x 768 15.2, 25088 x 96 x 384 25.1.
    static bool too_short_to_time(Problem p)
    {
        double const m = p.rows, k = p.width, n = p.columns;
        double const us = 3 + 2 * (m * k + k * n + 2 * m * n) / 2.5e6 + 2 * m * k * n / 300e6;
        p.hopper = 1, p.tile_rows = p.tile_columns = 64;
        return us < 15 && supported(p) == 0;
    }
    static int launch(Problem const& p, void*, cudaStream_t stream)
    {
        return onnxfuse_launch_linear(&p, stream);
    }

    int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t nbOutputs, nvinfer1::DataType const* inputTypes,
        int32_t nbInputs) const noexcept override
    {
        return status([&] {
            if (!is_half(inputTypes[0]))
                refuse("input 0 has TensorRT data type %d; float16 and bfloat16 are supported", static_cast<int>(inputTypes[0]));
            one_type(outputTypes, nbOutputs, inputTypes, nbInputs);
        });
    }
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const*, int32_t,
        nvinfer1::DimsExprs* outputs, int32_t nbOutputs, nvinfer1::IExprBuilder& builder) noexcept override
    {
        return status([&] {
            std::vector<Shape> const shapes = shapes_of(inputs, nbInputs);
            check(shapes);
            int64_t const columns = shapes[1].last();
            if (gated_ && columns < 0)
                refuse("the number of columns of W must be known when the engine is built");
            for (int32_t i = 0; i < nbOutputs; ++i)
            {
                outputs[i] = inputs[0];
                outputs[i].d[inputs[0].nbDims - 1] = gated_ ? builder.constant(columns / 2) : inputs[1].d[1];
            }
        });
    }
    bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t, int32_t) noexcept override
    {
        nvinfer1::PluginTensorDesc const& desc = inOut[pos].desc;
        return is_half(desc.type) && desc.type == inOut[0].desc.type && desc.format == nvinfer1::TensorFormat::kLINEAR;
    }
    void check(std::vector<Shape> const& inputs) const
    {
        size_t const wanted = norm_ ? 7 : residual_ ? 5 : 3;
        if (inputs.size() != wanted)
            refuse("%zu inputs; it takes %zu", inputs.size(), wanted);
        check_rank("X", inputs[0], 2);
        if (inputs[1].rank() != 2)
            refuse("W has rank %d; it must have 2", inputs[1].rank());
        int64_t const columns = inputs[1].last();
        check_same("W", inputs[1], "width of X, columns", {{inputs[0].last(), columns}});
        for (int64_t const size : inputs[1].extents)
        {
            if (size >= 0 && size % 8 != 0)
                refuse("W has shape %s; its sizes must be multiples of 8; leave this node to TensorRT", inputs[1].text().c_str());
        }
        if (gated_ && columns >= 0 && columns % 16 != 0)
            refuse("W has %lld columns; gated it must have a multiple of 16", static_cast<long long>(columns));
        if (norm_ && columns > kMostNormed)
            refuse("W has %lld columns; the norm takes up to %d; leave this node to TensorRT", static_cast<long long>(columns), kMostNormed);
        check_per_column("bias", inputs[2], columns);
        if (residual_)
        {
            check_per_column("scale", inputs[3], columns);
            Shape output = inputs[0];
            output.extents.back() = columns;
            check_same("residual", inputs[4], "the product", output);
        }
        if (norm_)
        {
            check_per_column("gamma", inputs[5], columns);
            check_per_column("beta", inputs[6], columns);
        }
    }
    Problem sized(nvinfer1::PluginTensorDesc const* inputs) const
    {
        nvinfer1::Dims const& w = inputs[1].dims;
        Problem p{};
        p.dtype = static_cast<int>(dtype_of(inputs[0].type));
        p.activation = static_cast<int>(kind_);
        p.rows = extent(rows_of(inputs[0].dims), "the number of rows");
        p.width = extent(w.d[0], "the width");
        p.columns = extent(w.d[1], "the number of columns");
        p.ending = static_cast<int>(gated_ ? Ending::kGated : norm_ ? Ending::kNorm : Ending::kColumns);
        p.epsilon = epsilon_;
        return p;
    }
    void place(Problem& p, void const* const* inputs, void* const* outputs) const
    {
        p.input = inputs[0], p.weight = inputs[1], p.bias = inputs[2], p.output = outputs[0];
        if (residual_)
            p.scale = inputs[3], p.residual = inputs[4];
        if (norm_)
            p.gamma = inputs[5], p.beta = inputs[6], p.total = outputs_ == 2 ? outputs[1] : nullptr;
    }

private:
    static Activation kind_of(std::string const& activation)
    {
        constexpr std::pair<char const*, Activation> kKinds[] = {{"none", Activation::kNone}, {"relu", Activation::kRelu},
            {"silu", Activation::kSilu}, {"gelu", Activation::kGelu}, {"gelu_tanh", Activation::kGeluTanh}, {"gelu_quick", Activation::kGeluQuick}};
        for (auto const& [name, kind] : kKinds)
        {
            if (activation == name)
                return kind;
        }
        refuse("field 'activation' is '%s'; it must be none, relu, silu, gelu, gelu_tanh or gelu_quick", activation.c_str());
    }

    std::string activation_;
    int32_t residual_;
    int32_t gated_;
    int32_t norm_;
    float epsilon_;
    int32_t outputs_;
    Activation kind_;
};

static Registration<Linear> const registration;
} // namespace onnxfuse
