// Tactics of a plugin: numbers from 1 that TensorRT tries and tells again; 0 leaves the choice to the launcher.
#pragma once

#include <algorithm>
#include <vector>

#include "plugin.h"

namespace onnxfuse
{
// Derived of Node also has what the launcher takes: `Problem`, with a field `early` (the kernel may start before the stream's kernel before it
// has ended), and
//   static std::vector<Problem> const& tactics();           how to compute: only the fields of the tactic matter
//   static void use(Problem& problem, Problem const& tactic);
//   static int supported(Problem const& problem);           a cudaError_t, without launching
//   static int launch(Problem const& problem, void* workspace, cudaStream_t stream);
template <typename Derived>
class Tuned : public Node<Derived>
{
public:
    int32_t getNbTactics() noexcept override
    {
        return static_cast<int32_t>(valid_.size());
    }
    int32_t getValidTactics(int32_t* tactics, int32_t nbTactics) noexcept override
    {
        std::copy_n(valid_.begin(), std::min<size_t>(valid_.size(), static_cast<size_t>(std::max(nbTactics, 0))), tactics);
        return 0;
    }
    int32_t setTactic(int32_t tactic) noexcept override
    {
        tactic_ = tactic;
        return 0;
    }
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override
    {
        return this->clone();
    }

protected:
    // The tactics that can compute this problem, whose pointers are not looked at. Refused where this GPU has none.
    template <typename Problem>
    void find_tactics(Problem problem)
    {
        valid_.clear();
        auto const& all = Derived::tactics();
        for (size_t i = 0; i < all.size(); ++i)
        {
            Derived::use(problem, all[i]);
            if (Derived::supported(problem) == 0)
                valid_.push_back(static_cast<int32_t>(i) + 1);
        }
        if (valid_.empty())
            refuse("this GPU has no kernel for these shapes; leave this node to TensorRT");
    }
    // With the tactic that was set; a tactic is chosen for one shape, and where it cannot compute another the launcher chooses.
    template <typename Problem>
    void run(Problem problem, void* workspace, cudaStream_t stream) const
    {
        auto const& all = Derived::tactics();
        Problem chosen = problem;
        if (tactic_ >= 1 && tactic_ <= static_cast<int32_t>(all.size()))
            Derived::use(chosen, all[static_cast<size_t>(tactic_) - 1]);
        if (Derived::supported(chosen) != 0)
            chosen = problem;
        chosen.early = 1; // what is read before the kernel before has ended are constants of the engine
        if (int const failed = Derived::launch(chosen, workspace, stream))
            refuse("the kernel did not start: %s", onnxfuse_launch_error(failed));
    }

private:
    std::vector<int32_t> valid_; // of the shapes last configured
    int32_t tactic_ = 0;
};

// An extent as the launchers take it.
inline int32_t extent(int64_t value, char const* name)
{
    if (value < 0 || value > INT32_MAX)
        refuse("%s is %lld; the kernel takes extents up to 2^31 - 1", name, static_cast<long long>(value));
    return static_cast<int32_t>(value);
}

inline float checked_epsilon_of(Fields const& fields)
{
    float const epsilon = fields.number("epsilon", 1e-5f); // ONNX's default
    if (!(epsilon >= 0.0f) || epsilon > 3e38f)
        refuse("field 'epsilon' is %g; it must be a number that is not negative", static_cast<double>(epsilon));
    return epsilon;
}

// All inputs and outputs are of the type of input 0.
inline void one_type(nvinfer1::DataType* outputs, int32_t outputs_count, nvinfer1::DataType const* inputs, int32_t inputs_count)
{
    dtype_of(inputs[0]);
    for (int32_t i = 1; i < inputs_count; ++i)
    {
        if (inputs[i] != inputs[0])
            refuse("input %d has another type than input 0; cast all inputs to one type", i);
    }
    std::fill(outputs, outputs + outputs_count, inputs[0]);
}

inline bool is_float(nvinfer1::DataType type)
{
    return type == nvinfer1::DataType::kFLOAT || type == nvinfer1::DataType::kHALF || type == nvinfer1::DataType::kBF16;
}

inline bool is_half(nvinfer1::DataType type)
{
    return type == nvinfer1::DataType::kHALF || type == nvinfer1::DataType::kBF16;
}
} // namespace onnxfuse
