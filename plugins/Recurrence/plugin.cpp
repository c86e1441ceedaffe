// LSTMSequence and GRUSequence: one to four layers of ONNX's LSTM or GRU, with the transposes around them.
//
// Inputs: X, then W, R and B? of every layer, then sequence_lens?, then initial_h? (and initial_c?) of every layer; what is absent is
// left out, and a field has_... says so. Outputs: Y, then Y_h (and Y_c) of every layer.
#include <algorithm>
#include <cmath>

#include "../common/tactics.h"
#include "launch.h"

namespace onnxfuse
{
using nvinfer1::DataType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

namespace
{
constexpr int kMostLayers = 4;

// Names of fields as they are given to TensorRT by pointer.
struct LayerFields
{
    char const* bias;
    char const* h;
    char const* c;
};
constexpr LayerFields kLayerFields[kMostLayers]
    = {{"has_b1", "has_h1", "has_c1"}, {"has_b2", "has_h2", "has_c2"}, {"has_b3", "has_h3", "has_c3"}, {"has_b4", "has_h4", "has_c4"}};

// The tactics: variants of onnxfuse_launch_recurrence() and what they leave open. A tactic's number is its place here, from 1.
struct Tactic
{
    int variant, rows, cluster;
};
constexpr Tactic kTactics[] = {{kRecurrenceSteps, 0, 0}, {kRecurrenceGrid, 0, 0}, {kRecurrenceIndependent, 1, 0}, // hidden up to 64
    {kRecurrenceIndependent, 2, 0}, {kRecurrenceIndependent, 4, 0}, {kRecurrenceIndependent, 8, 0}, {kRecurrenceCluster, 0, 8},
    {kRecurrenceCluster, 0, 16}, {kRecurrenceResident, 0, 0}};
constexpr int kTacticCount = static_cast<int>(sizeof kTactics / sizeof kTactics[0]);

// Which optional inputs there are, and where all lie.
struct Places
{
    struct Of
    {
        int weights, recurrent, bias, h, c; // -1: absent
    };
    Of layer[kMostLayers];
    int lengths;
    int count;
};
} // namespace

template <typename Kind>
class Recurrence final : public Numbered<Recurrence<Kind>>
{
    using Base = Numbered<Recurrence<Kind>>;
    using Base::status;
    using Base::tactic_;
    using Base::valid_;

public:
    static constexpr char const* kName = Kind::kName;
    static constexpr int kStates = Kind::kGates == 4 ? 2 : 1;

    static std::vector<PluginField> const& fields()
    {
        static std::vector<PluginField> const known = [] {
            std::vector<PluginField> all{{"direction", nullptr, PluginFieldType::kCHAR, 1}, {"clip", nullptr, PluginFieldType::kFLOAT32, 1},
                {"hidden_size", nullptr, PluginFieldType::kINT32, 1}, {"layers", nullptr, PluginFieldType::kINT32, 1},
                {"outputs", nullptr, PluginFieldType::kINT32, 1}, {"linear_before_reset", nullptr, PluginFieldType::kINT32, 1},
                {"x_perm", nullptr, PluginFieldType::kINT32, 3}, {"y_perm", nullptr, PluginFieldType::kINT32, 4},
                {"joined", nullptr, PluginFieldType::kINT32, 1}, {"has_lengths", nullptr, PluginFieldType::kINT32, 1}};
            for (LayerFields const& layer : kLayerFields)
            {
                all.push_back({layer.bias, nullptr, PluginFieldType::kINT32, 1});
                all.push_back({layer.h, nullptr, PluginFieldType::kINT32, 1});
                if (kStates == 2)
                    all.push_back({layer.c, nullptr, PluginFieldType::kINT32, 1});
            }
            return all;
        }();
        return known;
    }

    explicit Recurrence(Fields const& fields)
        : direction_(fields.text("direction", "forward"))
        , clip_(fields.number("clip", 0.0f))
        , hidden_(fields.integer("hidden_size", 0, 0, 1 << 20))
        , layers_(fields.integer("layers", 1, 1, kMostLayers))
        , outputs_(fields.integer("outputs", 1 + kStates * layers_, 1, 1 + kStates * layers_))
        , before_reset_(fields.integer("linear_before_reset", 0, 0, 1))
        , x_perm_(fields.integers("x_perm", {0, 1, 2}))
        , y_perm_(fields.integers("y_perm", {0, 2, 1, 3}))
        , joined_(fields.integer("joined", 1, 0, 1))
        , has_lengths_(fields.integer("has_lengths", 0, 0, 1))
    {
        if (direction_ != "forward" && direction_ != "reverse" && direction_ != "bidirectional")
            refuse("field 'direction' is '%s'; it must be forward, reverse or bidirectional", direction_.c_str());
        if (!(clip_ >= 0.0f))
            refuse("field 'clip' is %g; it must be a number that is not negative", static_cast<double>(clip_));
        if (hidden_ < 8 || hidden_ % 8 != 0)
            refuse("field 'hidden_size' is %d; the kernels take multiples of 8; leave this node to TensorRT", hidden_);
        using List = std::vector<int32_t>;
        if (x_perm_ != List{0, 1, 2} && x_perm_ != List{1, 0, 2})
            refuse("field 'x_perm' must be 0 1 2 or 1 0 2");
        if (y_perm_ != (joined_ ? List{0, 2, 1, 3} : List{0, 1, 2, 3}) && y_perm_ != List{2, 0, 1, 3})
            refuse("field 'y_perm' must be %s or 2 0 1 3", joined_ ? "0 2 1 3" : "0 1 2 3");
        for (int i = 0; i < layers_; ++i)
        {
            has_bias_[i] = fields.integer(kLayerFields[i].bias, 0, 0, 1);
            has_h_[i] = fields.integer(kLayerFields[i].h, 0, 0, 1);
            has_c_[i] = kStates == 2 ? fields.integer(kLayerFields[i].c, 0, 0, 1) : 0;
        }
    }

    int outputs() const
    {
        return outputs_;
    }

    std::string key() const
    {
        std::string text = std::string("onnxfuse 1 ") + kName + " " + direction_ + " hidden=" + std::to_string(hidden_)
            + " layers=" + std::to_string(layers_) + " outputs=" + std::to_string(outputs_) + " before_reset=" + std::to_string(before_reset_)
            + " clip=" + (limit() > 0.0f ? "1" : "0") + " x=" + std::to_string(x_perm_[0]) + " y=" + std::to_string(y_perm_[0])
            + std::to_string(joined_) + " lengths=" + std::to_string(has_lengths_);
        for (int i = 0; i < layers_; ++i)
            text += " " + std::to_string(has_bias_[i]) + std::to_string(has_h_[i]) + std::to_string(has_c_[i]);
        return text;
    }

    std::vector<PluginField> state() const
    {
        std::vector<PluginField> all{state_field("direction", direction_), state_field("clip", clip_), state_field("hidden_size", hidden_),
            state_field("layers", layers_), state_field("outputs", outputs_), state_field("linear_before_reset", before_reset_),
            state_field("x_perm", x_perm_), state_field("y_perm", y_perm_), state_field("joined", joined_),
            state_field("has_lengths", has_lengths_)};
        for (int i = 0; i < layers_; ++i)
        {
            all.push_back(state_field(kLayerFields[i].bias, has_bias_[i]));
            all.push_back(state_field(kLayerFields[i].h, has_h_[i]));
            if (kStates == 2)
                all.push_back(state_field(kLayerFields[i].c, has_c_[i]));
        }
        return all;
    }

    // --- building --------------------------------------------------------------------------------------------------------

    int32_t getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes, int32_t nbInputs) const noexcept override
    {
        return status([&] {
            dtype_of(inputTypes[0]);
            int const lengths = places().lengths;
            for (int32_t i = 1; i < nbInputs; ++i)
            {
                if (i == lengths ? inputTypes[i] != DataType::kINT32 : inputTypes[i] != inputTypes[0])
                    refuse("input %d has another type than %s", i, i == lengths ? "int32" : "input 0; cast all inputs to one type");
            }
            std::fill(outputTypes, outputTypes + nbOutputs, inputTypes[0]);
        });
    }

    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const*, int32_t,
        nvinfer1::DimsExprs* outputs, int32_t nbOutputs, nvinfer1::IExprBuilder& builder) noexcept override
    {
        return status([&] {
            check(shapes_of(inputs, nbInputs));
            auto const* const steps = inputs[0].d[batch_first() ? 1 : 0];
            auto const* const batch = inputs[0].d[batch_first() ? 0 : 1];
            auto const* const directions = builder.constant(directions_count());
            auto const* const hidden = builder.constant(hidden_);
            nvinfer1::IDimensionExpr const* const y[4] = {steps, directions, batch, hidden};
            if (!joined_)
            {
                outputs[0].nbDims = 4;
                for (int i = 0; i < 4; ++i)
                    outputs[0].d[i] = y[y_perm_[i]];
            }
            else
            {
                outputs[0].nbDims = 3;
                outputs[0].d[0] = y[y_perm_[0]];
                outputs[0].d[1] = y[y_perm_[1]];
                outputs[0].d[2] = builder.constant(int64_t{directions_count()} * hidden_);
            }
            for (int32_t i = 1; i < nbOutputs; ++i)
            {
                outputs[i].nbDims = 3;
                outputs[i].d[0] = directions;
                outputs[i].d[1] = batch;
                outputs[i].d[2] = hidden;
            }
        });
    }

    bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t, int32_t) noexcept override
    {
        DataType const type = inOut[pos].desc.type;
        if (inOut[pos].desc.format != nvinfer1::TensorFormat::kLINEAR)
            return false;
        if (pos == places().lengths)
            return type == DataType::kINT32;
        return is_float(type) && type == inOut[0].desc.type;
    }

    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs, nvinfer1::DynamicPluginTensorDesc const*,
        int32_t) noexcept override
    {
        return status([&] {
            check(shapes_of(in, nbInputs));
            OnnxfuseRecurrence problem = sized(in[0].desc.type, in[0].opt, in[1].opt);
            valid_.clear();
            for (int i = 0; i < kTacticCount; ++i)
            {
                use(problem, i + 1);
                if (onnxfuse_recurrence_variant(&problem) > 0)
                    valid_.push_back(i + 1);
            }
        });
    }

    // Enough for every shape up to the largest and for every tactic.
    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* in, int32_t, nvinfer1::DynamicPluginTensorDesc const*,
        int32_t) const noexcept override
    {
        size_t most = 0;
        accepted(kName, [&] {
            OnnxfuseRecurrence problem = sized(in[0].desc.type, in[0].max, in[1].max);
            for (int i = 0; i <= kTacticCount; ++i)
            {
                use(problem, i);
                most = std::max(most, onnxfuse_recurrence_workspace_up_to(&problem));
            }
        });
        return most;
    }

    // --- running ---------------------------------------------------------------------------------------------------------

    int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const*, void const* const* inputs,
        void* const* outputs, void* workspace, cudaStream_t stream) noexcept override
    {
        return status([&] {
            OnnxfuseRecurrence problem = sized(inputDesc[0].type, inputDesc[0].dims, inputDesc[1].dims);
            Places const at = places();
            auto input = [&](int place) { return place < 0 ? nullptr : inputs[place]; };
            auto output = [&](int place) { return place < outputs_ ? outputs[place] : nullptr; };
            problem.x = inputs[0];
            problem.lengths = static_cast<int32_t const*>(input(at.lengths));
            problem.y = outputs[0];
            for (int i = 0; i < layers_; ++i)
            {
                Places::Of const& of = at.layer[i];
                problem.layer[i] = {input(of.weights), input(of.recurrent), input(of.bias), input(of.h), input(of.c),
                    output(1 + i * kStates), kStates == 2 ? output(2 + i * kStates) : nullptr};
            }
            if (problem.batch == 0)
                return;
            use(problem, tactic_);
            // A tactic is chosen for one shape; another may be too large for it.
            if (onnxfuse_recurrence_variant(&problem) < 0)
                use(problem, 0);
            size_t const bytes = onnxfuse_recurrence_workspace(&problem);
            int const failed = onnxfuse_launch_recurrence(&problem, workspace, bytes, stream);
            if (failed)
                refuse("the kernel did not start: %s", onnxfuse_launch_error(failed));
        });
    }

    // Refuses shapes; extents of -1 are unknown.
    void check(std::vector<Shape> const& inputs) const
    {
        Places const at = places();
        if (static_cast<int>(inputs.size()) != at.count)
            refuse("%zu inputs; its fields tell of %d", inputs.size(), at.count);
        if (inputs[0].rank() != 3)
            refuse("X has rank %d; it must have 3", inputs[0].rank());
        int64_t const batch = inputs[0].extents[batch_first() ? 0 : 1];
        int64_t const directions = directions_count(), rows = int64_t{Kind::kGates} * hidden_;
        int64_t width = inputs[0].last();
        for (int i = 0; i < layers_; ++i)
        {
            Places::Of const& of = at.layer[i];
            check_same("W", inputs[of.weights], "direction, gates, input", {{directions, rows, width}});
            check_same("R", inputs[of.recurrent], "direction, gates, hidden", {{directions, rows, hidden_}});
            if (of.bias >= 0)
                check_same("B", inputs[of.bias], "direction, gates", {{directions, 2 * rows}});
            for (int state : {of.h, of.c})
            {
                if (state >= 0)
                    check_same("initial state", inputs[state], "direction, batch, hidden", {{directions, batch, hidden_}});
            }
            width = directions * hidden_;
        }
        if (at.lengths >= 0)
            check_same("sequence_lens", inputs[at.lengths], "batch", {{batch}});
    }

private:
    int directions_count() const
    {
        return direction_ == "bidirectional" ? 2 : 1;
    }
    bool batch_first() const
    {
        return x_perm_[0] == 1;
    }
    // ONNX's default clip is no limit, and so is what stands for it.
    float limit() const
    {
        return clip_ < 3e38f ? clip_ : 0.0f;
    }

    Places places() const
    {
        Places at{};
        int next = 1;
        auto take = [&](int32_t there) { return there ? next++ : -1; };
        for (int i = 0; i < layers_; ++i)
        {
            at.layer[i].weights = next++;
            at.layer[i].recurrent = next++;
            at.layer[i].bias = take(has_bias_[i]);
        }
        at.lengths = take(has_lengths_);
        for (int i = 0; i < layers_; ++i)
        {
            at.layer[i].h = take(has_h_[i]);
            at.layer[i].c = take(has_c_[i]);
        }
        at.count = next;
        return at;
    }

    // The problem of these shapes, without its tensors. x: of X; w: of the first layer's W.
    OnnxfuseRecurrence sized(DataType type, nvinfer1::Dims const& x, nvinfer1::Dims const& w) const
    {
        for (int i = 0; i < 3; ++i)
        {
            if (x.d[i] > INT32_MAX || w.d[2] > INT32_MAX)
                refuse("X has an extent of %lld", static_cast<long long>(x.d[i]));
        }
        OnnxfuseRecurrence p{};
        int const batch_axis = batch_first() ? 0 : 1;
        int const directions = directions_count();
        p.dtype = static_cast<int>(dtype_of(type));
        p.cell = kStates == 2 ? 0 : before_reset_ ? 1 : 2;
        p.directions = directions;
        p.reversed = direction_ == "forward" ? 0 : direction_ == "reverse" ? 1 : 2;
        p.layers = layers_;
        p.steps = static_cast<int32_t>(x.d[1 - batch_axis]);
        p.batch = static_cast<int32_t>(x.d[batch_axis]);
        p.width = static_cast<int32_t>(w.d[2]);
        p.hidden = hidden_;
        p.clip = limit();
        p.x_step = batch_first() ? p.width : int64_t{p.batch} * p.width;
        p.x_row = batch_first() ? int64_t{p.steps} * p.width : p.width;
        // Y is [steps, directions, batch, hidden], its axes in the order of y_perm.
        int64_t const extents[4] = {p.steps, directions, p.batch, hidden_};
        int64_t strides[4];
        int64_t stride = 1;
        for (int i = 3; i >= 0; --i)
        {
            strides[y_perm_[i]] = stride;
            stride *= extents[y_perm_[i]];
        }
        p.y_step = strides[0];
        p.y_direction = strides[1];
        p.y_row = strides[2];
        p.state_direction = int64_t{p.batch} * hidden_;
        p.state_row = hidden_;
        return p;
    }

    static void use(OnnxfuseRecurrence& problem, int tactic)
    {
        Tactic const how = tactic >= 1 && tactic <= kTacticCount ? kTactics[tactic - 1] : Tactic{};
        problem.variant = how.variant;
        problem.rows = how.rows;
        problem.cluster = how.cluster;
    }

    std::string direction_;
    float clip_;
    int32_t hidden_;
    int32_t layers_;
    int32_t outputs_;
    int32_t before_reset_;
    std::vector<int32_t> x_perm_, y_perm_;
    int32_t joined_;
    int32_t has_lengths_;
    int32_t has_bias_[kMostLayers] = {};
    int32_t has_h_[kMostLayers] = {};
    int32_t has_c_[kMostLayers] = {};
};

namespace
{
struct Lstm
{
    static constexpr char const* kName = "LSTMSequence";
    static constexpr int kGates = 4;
};
struct Gru
{
    static constexpr char const* kName = "GRUSequence";
    static constexpr int kGates = 3;
};
} // namespace

static Registration<Recurrence<Lstm>> const lstm_registration;
static Registration<Recurrence<Gru>> const gru_registration;
} // namespace onnxfuse
