#include "plugin.h"

#include <cmath>
#include <cstdarg>
#include <cstring>

namespace onnxfuse
{
using nvinfer1::DataType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

void refuse(char const* format, ...)
{
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    throw Refusal(message);
}

void say(char const* op, char const* message) noexcept
{
    std::fprintf(stderr, "onnxfuse: %s: %s\n", op, message);
}

Fields::Fields(nvinfer1::PluginFieldCollection const* given, std::vector<PluginField> const& known)
    : given_(given)
{
    for (int32_t i = 0; given && i < given->nbFields; ++i)
    {
        std::string names;
        bool found = false;
        for (PluginField const& field : known)
        {
            found = found || std::strcmp(field.name, given->fields[i].name) == 0;
            names += (names.empty() ? "" : ", ") + std::string(field.name);
        }
        if (!found)
            refuse("field '%s' is not known; the fields are %s", given->fields[i].name, names.c_str());
    }
}

PluginField const* Fields::find(char const* name) const
{
    for (int32_t i = 0; given_ && i < given_->nbFields; ++i)
    {
        if (std::strcmp(given_->fields[i].name, name) == 0)
            return &given_->fields[i];
    }
    return nullptr;
}

template <typename T>
static double read(void const* data, int32_t index)
{
    T value;
    std::memcpy(&value, static_cast<T const*>(data) + index, sizeof value);
    return static_cast<double>(value);
}

double Fields::value(PluginField const& field, int32_t index, int32_t length) const
{
    double (*convert)(void const*, int32_t) = nullptr;
    switch (field.type)
    {
    case PluginFieldType::kFLOAT32: convert = read<float>; break;
    case PluginFieldType::kFLOAT64: convert = read<double>; break;
    case PluginFieldType::kINT8: convert = read<int8_t>; break;
    case PluginFieldType::kINT16: convert = read<int16_t>; break;
    case PluginFieldType::kINT32: convert = read<int32_t>; break;
    case PluginFieldType::kINT64: convert = read<int64_t>; break;
    default: refuse("field '%s' is no number (plugin field type %d)", field.name, static_cast<int>(field.type));
    }
    if (field.length != length || !field.data)
        refuse("field '%s' holds %d values; give one number", field.name, field.data ? field.length : 0);
    return convert(field.data, index);
}

std::vector<int32_t> Fields::integers(char const* name, std::vector<int32_t> const& absent) const
{
    PluginField const* const field = find(name);
    if (!field)
        return absent;
    std::vector<int32_t> numbers;
    for (int32_t i = 0; i < field->length; ++i)
    {
        double const number = value(*field, i, field->length);
        if (number != std::floor(number) || std::fabs(number) > INT32_MAX)
            refuse("field '%s' holds %g; it must hold whole numbers", name, number);
        numbers.push_back(static_cast<int32_t>(number));
    }
    return numbers;
}

float Fields::number(char const* name, float absent) const
{
    PluginField const* const field = find(name);
    return field ? static_cast<float>(value(*field)) : absent;
}

int32_t Fields::integer(char const* name, int32_t absent, int32_t low, int32_t high) const
{
    PluginField const* const field = find(name);
    if (!field)
        return absent;
    double const number = value(*field);
    if (!(number >= low && number <= high) || number != std::floor(number))
        refuse("field '%s' is %g; it must be a whole number from %d to %d", name, number, low, high);
    return static_cast<int32_t>(number);
}

std::string Fields::text(char const* name, char const* absent) const
{
    PluginField const* const field = find(name);
    if (!field)
        return absent;
    if (field->type != PluginFieldType::kCHAR || !field->data)
        refuse("field '%s' is no string (plugin field type %d)", name, static_cast<int>(field->type));
    // The length counts a closing zero or does not, depending on who made the field.
    auto const* const characters = static_cast<char const*>(field->data);
    return std::string(characters, strnlen(characters, static_cast<size_t>(std::max(field->length, 0))));
}

std::string Shape::text() const
{
    std::string written;
    for (int64_t const extent : extents)
        written += (written.empty() ? "" : "x") + (extent < 0 ? std::string("?") : std::to_string(extent));
    return "[" + written + "]";
}

Shape shape_of(nvinfer1::DimsExprs const& dims)
{
    Shape shape;
    for (int32_t i = 0; i < dims.nbDims; ++i)
        shape.extents.push_back(dims.d[i]->isConstant() ? dims.d[i]->getConstantValue() : -1);
    return shape;
}

Shape shape_of(nvinfer1::Dims const& dims)
{
    return {{dims.d, dims.d + std::max(dims.nbDims, 0)}};
}

std::vector<Shape> shapes_of(nvinfer1::DimsExprs const* dims, int32_t count)
{
    std::vector<Shape> shapes;
    for (int32_t i = 0; i < count; ++i)
        shapes.push_back(shape_of(dims[i]));
    return shapes;
}

std::vector<Shape> shapes_of(nvinfer1::PluginTensorDesc const* descs, int32_t count)
{
    std::vector<Shape> shapes;
    for (int32_t i = 0; i < count; ++i)
        shapes.push_back(shape_of(descs[i].dims));
    return shapes;
}

std::vector<Shape> shapes_of(nvinfer1::DynamicPluginTensorDesc const* descs, int32_t count)
{
    std::vector<Shape> shapes;
    for (int32_t i = 0; i < count; ++i)
        shapes.push_back(shape_of(descs[i].desc.dims));
    return shapes;
}

void check_rank(char const* input, Shape const& shape, int least)
{
    if (shape.rank() < least)
        refuse("%s has rank %d; it needs %d or more", input, shape.rank(), least);
}

void check_same(char const* input, Shape const& shape, char const* other, Shape const& expected)
{
    bool same = shape.rank() == expected.rank();
    for (int i = 0; same && i < shape.rank(); ++i)
        same = shape.extents[i] < 0 || expected.extents[i] < 0 || shape.extents[i] == expected.extents[i];
    if (!same)
    {
        refuse("%s %s has another shape than %s %s; a broadcast is not supported", input, shape.text().c_str(), other,
            expected.text().c_str());
    }
}

void check_per_column(char const* input, Shape const& shape, int64_t width)
{
    if (shape.rank() != 1 || (shape.last() >= 0 && width >= 0 && shape.last() != width))
    {
        refuse("%s has shape %s; it must be 1-D, of the last axis' length%s", input, shape.text().c_str(),
            width < 0 ? "" : (" " + std::to_string(width)).c_str());
    }
}

void check_width(Shape const& shape, int64_t most)
{
    if (shape.last() > most)
    {
        refuse("the last axis has %lld elements and the kernel takes up to %lld; leave this node to TensorRT",
            static_cast<long long>(shape.last()), static_cast<long long>(most));
    }
}

Dtype dtype_of(DataType type)
{
    switch (type)
    {
    case DataType::kFLOAT: return Dtype::kFloat32;
    case DataType::kHALF: return Dtype::kFloat16;
    case DataType::kBF16: return Dtype::kBfloat16;
    default: refuse("input 0 has TensorRT data type %d; float32, float16 and bfloat16 are supported", static_cast<int>(type));
    }
}

int64_t rows_of(nvinfer1::Dims const& dims)
{
    int64_t rows = 1;
    for (int32_t i = 0; i + 1 < dims.nbDims; ++i)
        rows *= dims.d[i];
    return rows;
}

bool is_float(DataType type)
{
    return type == DataType::kFLOAT || is_half(type);
}

bool is_half(DataType type)
{
    return type == DataType::kHALF || type == DataType::kBF16;
}

void one_type(DataType* outputs, int32_t outputs_count, DataType const* inputs, int32_t inputs_count)
{
    dtype_of(inputs[0]);
    for (int32_t i = 1; i < inputs_count; ++i)
    {
        if (inputs[i] != inputs[0])
            refuse("input %d has another type than input 0; cast all inputs to one type", i);
    }
    std::fill(outputs, outputs + outputs_count, inputs[0]);
}

int32_t extent(int64_t value, char const* name)
{
    if (value < 0 || value > INT32_MAX)
        refuse("%s is %lld; the kernel takes extents up to 2^31 - 1", name, static_cast<long long>(value));
    return static_cast<int32_t>(value);
}

std::array<int64_t, 4> broadcast_strides(nvinfer1::Dims const& dims)
{
    std::array<int64_t, 4> strides{};
    int64_t stride = 1;
    for (int i = 1; i <= dims.nbDims; ++i)
    {
        int64_t const own = dims.d[dims.nbDims - i];
        strides[static_cast<size_t>(4 - i)] = own == 1 ? 0 : stride;
        stride *= own;
    }
    return strides;
}

float checked_epsilon(Fields const& fields)
{
    float const epsilon = fields.number("epsilon", 1e-5f);
    if (!(epsilon >= 0.0f) || std::isinf(epsilon))
        refuse("field 'epsilon' is %g; it must be a number that is not negative", static_cast<double>(epsilon));
    return epsilon;
}

PluginField state_field(char const* name, float const& value)
{
    return {name, &value, PluginFieldType::kFLOAT32, 1};
}

PluginField state_field(char const* name, int32_t const& value)
{
    return {name, &value, PluginFieldType::kINT32, 1};
}

PluginField state_field(char const* name, std::vector<int32_t> const& value)
{
    return {name, value.data(), PluginFieldType::kINT32, static_cast<int32_t>(value.size())};
}

PluginField state_field(char const* name, std::string const& value)
{
    return {name, value.data(), PluginFieldType::kCHAR, static_cast<int32_t>(value.size())};
}
} // namespace onnxfuse
