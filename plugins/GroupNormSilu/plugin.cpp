// GroupNormSilu: inputs X [N, C, ...], Scale, Bias [C] and, with film, FilmScale, FilmShift [N, C, 1, ...]. Output as X. silu 0: without SiLU.
#include "../common/tactics.h"
#include "launch.h"

namespace onnxfuse
{
class GroupNormSilu final : public Tuned<GroupNormSilu>
{
public:
    using Problem = OnnxfuseGroupNorm;
    static constexpr char const* kName = "GroupNormSilu";

    static std::vector<nvinfer1::PluginField> const& fields()
    {
        static std::vector<nvinfer1::PluginField> const known{{"epsilon", nullptr, nvinfer1::PluginFieldType::kFLOAT32, 1},
            {"num_groups", nullptr, nvinfer1::PluginFieldType::kINT32, 1}, {"film", nullptr, nvinfer1::PluginFieldType::kINT32, 1},
            {"silu", nullptr, nvinfer1::PluginFieldType::kINT32, 1}};
        return known;
    }

    explicit GroupNormSilu(Fields const& fields)
        : epsilon_(checked_epsilon(fields))
        , groups_(fields.integer("num_groups", 0, 0, 1 << 20))
        , film_(fields.integer("film", 0, 0, 1))
        , silu_(fields.integer("silu", 1, 0, 1))
    {
        if (groups_ < 1)
            refuse("field 'num_groups' is %d; it must be 1 or more", groups_);
    }

    int outputs() const
    {
        return 1;
    }
    std::vector<nvinfer1::PluginField> state() const
    {
        return {state_field("epsilon", epsilon_), state_field("num_groups", groups_), state_field("film", film_), state_field("silu", silu_)};
    }
    std::string key() const
    {
        return "onnxfuse 1 GroupNormSilu groups=" + std::to_string(groups_) + " film=" + std::to_string(film_) + " silu=" + std::to_string(silu_);
    }

    static std::vector<Problem> const& tactics()
    {
        static std::vector<Problem> const all = [] {
            std::vector<Problem> made;
            auto const add = [&](int threads, int split, int bulk, int two_kernels) {
                Problem p{};
                p.threads = threads, p.split = split, p.bulk = bulk, p.two_kernels = two_kernels;
                made.push_back(p);
            };
            for (int const split : {1, 2, 4, 8, 16})
            {
                add(128, split, 0, 0);
                add(256, split, 0, 0);
                add(512, split, 1, 0);
            }
            add(512, 16, 0, 0);
            add(256, 0, 0, 1);
            add(512, 0, 0, 1);
            for (int const split : {4, 8, 16})
                add(512, split, 2, 0);
            return made;
        }();
        return all;
    }
    static void use(Problem& p, Problem const& tactic)
    {
        p.threads = tactic.threads, p.split = tactic.split, p.bulk = tactic.bulk, p.two_kernels = tactic.two_kernels;
    }
    static int supported(Problem const& p)
    {
        return onnxfuse_group_norm_supported(&p);
    }
    static int launch(Problem const& p, void* workspace, cudaStream_t stream)
    {
        return onnxfuse_launch_group_norm(&p, workspace, stream);
    }

    bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs, int32_t) noexcept override
    {
        using nvinfer1::TensorFormat;
        nvinfer1::PluginTensorDesc const& desc = inOut[pos].desc;
        if (!is_float(desc.type) || desc.type != inOut[0].desc.type)
            return false;
        // A map of whole groups of 8 channels may be channels last; the output is as the input.
        bool const last_there = is_half(desc.type) && desc.dims.nbDims == 4 && desc.dims.d[1] > 0 && desc.dims.d[1] % 8 == 0;
        if (pos == 0)
            return desc.format == TensorFormat::kLINEAR || (last_there && desc.format == TensorFormat::kHWC8);
        return desc.format == (pos == nbInputs ? inOut[0].desc.format : TensorFormat::kLINEAR);
    }
    // Enough for every shape up to the largest, and for every tactic: a group has as many parts at most.
    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* in, int32_t, nvinfer1::DynamicPluginTensorDesc const*,
        int32_t) const noexcept override
    {
        size_t most = 0;
        accepted(kName, [&] { most = onnxfuse_group_norm_workspace_up_to(in[0].max.d[0], groups_); });
        return most;
    }
    void check(std::vector<Shape> const& inputs) const
    {
        size_t const wanted = film_ ? 5 : 3;
        if (inputs.size() != wanted)
            refuse("%zu inputs; it takes %zu", inputs.size(), wanted);
        check_rank("X", inputs[0], 3);
        int64_t const channels = inputs[0].extents[1];
        if (channels >= 0 && channels % groups_ != 0)
            refuse("X has %lld channels, which cannot be divided into %d groups", static_cast<long long>(channels), groups_);
        check_per_column("Scale", inputs[1], channels);
        check_per_column("Bias", inputs[2], channels);
        for (size_t i = 3; i < wanted; ++i)
        {
            Shape film = inputs[0];
            std::fill(film.extents.begin() + 2, film.extents.end(), 1);
            check_same(i == 3 ? "FilmScale" : "FilmShift", inputs[i], "one value for each channel of each image", film);
        }
    }
    Problem sized(nvinfer1::PluginTensorDesc const* inputs) const
    {
        nvinfer1::Dims const& x = inputs[0].dims;
        Problem p{};
        p.dtype = static_cast<int>(dtype_of(inputs[0].type));
        p.images = extent(x.d[0], "the batch");
        p.channels = extent(x.d[1], "the number of channels");
        p.groups = groups_;
        int64_t pixels = 1;
        for (int i = 2; i < x.nbDims; ++i)
            pixels *= x.d[i];
        p.pixels = extent(pixels, "the number of pixels");
        p.channels_last = inputs[0].format == nvinfer1::TensorFormat::kHWC8;
        p.epsilon = epsilon_;
        p.silu = silu_;
        return p;
    }
    void place(Problem& p, void const* const* inputs, void* const* outputs) const
    {
        p.input = inputs[0], p.gamma = inputs[1], p.beta = inputs[2], p.output = outputs[0];
        if (film_)
            p.film_scale = inputs[3], p.film_shift = inputs[4];
    }

private:
    float epsilon_;
    int32_t groups_;
    int32_t film_;
    int32_t silu_;
};

static Registration<GroupNormSilu> const registration;
} // namespace onnxfuse
