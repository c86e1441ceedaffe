// Prints every size, offset and enumerator of the plugin interface that the library relies on, one "name value" a line. Compiled once
// with the own header and once with each official one; the outputs have to be the same. The Probe classes override every virtual
// function, so that `g++ -fdump-lang-class` names the function in each slot of their virtual tables.
#include <cstddef>
#include <cstdio>

#include "../../plugins/abi/NvInferPluginAbi.h"

using namespace nvinfer1;

struct ProbePlugin : IPluginV3
{
    APILanguage getAPILanguage() const noexcept override { return APILanguage::kCPP; }
    InterfaceInfo getInterfaceInfo() const noexcept override { return IPluginV3::getInterfaceInfo(); }
    IPluginCapability* getCapabilityInterface(PluginCapabilityType) noexcept override { return nullptr; }
    IPluginV3* clone() noexcept override { return nullptr; }
};

struct ProbeCore : IPluginV3OneCore
{
    APILanguage getAPILanguage() const noexcept override { return APILanguage::kCPP; }
    InterfaceInfo getInterfaceInfo() const noexcept override { return IPluginV3OneCore::getInterfaceInfo(); }
    AsciiChar const* getPluginName() const noexcept override { return ""; }
    AsciiChar const* getPluginVersion() const noexcept override { return ""; }
    AsciiChar const* getPluginNamespace() const noexcept override { return ""; }
};

struct ProbeBuild : IPluginV3OneBuild
{
    APILanguage getAPILanguage() const noexcept override { return APILanguage::kCPP; }
    InterfaceInfo getInterfaceInfo() const noexcept override { return IPluginV3OneBuild::getInterfaceInfo(); }
    int32_t configurePlugin(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*, int32_t) noexcept override { return 0; }
    int32_t getOutputDataTypes(DataType*, int32_t, DataType const*, int32_t) const noexcept override { return 0; }
    int32_t getOutputShapes(DimsExprs const*, int32_t, DimsExprs const*, int32_t, DimsExprs*, int32_t, IExprBuilder&) noexcept override { return 0; }
    bool supportsFormatCombination(int32_t, DynamicPluginTensorDesc const*, int32_t, int32_t) noexcept override { return true; }
    int32_t getNbOutputs() const noexcept override { return 1; }
    size_t getWorkspaceSize(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*, int32_t) const noexcept override { return 0; }
    int32_t getValidTactics(int32_t*, int32_t) noexcept override { return 0; }
    int32_t getNbTactics() noexcept override { return 0; }
    char const* getTimingCacheID() noexcept override { return nullptr; }
    int32_t getFormatCombinationLimit() noexcept override { return 1; }
    char const* getMetadataString() noexcept override { return nullptr; }
};

struct ProbeRuntime : IPluginV3OneRuntime
{
    APILanguage getAPILanguage() const noexcept override { return APILanguage::kCPP; }
    InterfaceInfo getInterfaceInfo() const noexcept override { return IPluginV3OneRuntime::getInterfaceInfo(); }
    int32_t setTactic(int32_t) noexcept override { return 0; }
    int32_t onShapeChange(PluginTensorDesc const*, int32_t, PluginTensorDesc const*, int32_t) noexcept override { return 0; }
    int32_t enqueue(PluginTensorDesc const*, PluginTensorDesc const*, void const* const*, void* const*, void*, cudaStream_t) noexcept override { return 0; }
    IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return nullptr; }
    PluginFieldCollection const* getFieldsToSerialize() noexcept override { return nullptr; }
};

struct ProbeCreator : IPluginCreatorV3One
{
    APILanguage getAPILanguage() const noexcept override { return APILanguage::kCPP; }
    InterfaceInfo getInterfaceInfo() const noexcept override { return IPluginCreatorV3One::getInterfaceInfo(); }
    IPluginV3* createPlugin(AsciiChar const*, PluginFieldCollection const*, TensorRTPhase) noexcept override { return nullptr; }
    PluginFieldCollection const* getFieldNames() noexcept override { return nullptr; }
    AsciiChar const* getPluginName() const noexcept override { return ""; }
    AsciiChar const* getPluginVersion() const noexcept override { return ""; }
    AsciiChar const* getPluginNamespace() const noexcept override { return ""; }
};

struct ProbeDimension : apiv::VDimensionExpr
{
    bool isConstant() const override { return true; }
    int64_t getConstantValue() const override { return 0; }
    bool isSizeTensor() const override { return false; }
};

struct ProbeBuilder : apiv::VExprBuilder
{
    IDimensionExpr const* constant(int64_t) override { return nullptr; }
    IDimensionExpr const* operation(DimensionOperation, IDimensionExpr const&, IDimensionExpr const&) override { return nullptr; }
    IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) override { return nullptr; }
};

struct ProbeExpressions : IExprBuilder
{
    static size_t implementation() { return offsetof(ProbeExpressions, mImpl); }
};

struct ProbeExpression : IDimensionExpr
{
    static size_t implementation() { return offsetof(ProbeExpression, mImpl); }
};

#define SIZE(T) std::printf("sizeof " #T " %zu\n", sizeof(T))
#define OFFSET(T, member) std::printf("offsetof " #T "." #member " %zu %zu\n", offsetof(T, member), sizeof(T::member))
#define ENUM(T, value) std::printf(#T "::" #value " %lld of %zu\n", static_cast<long long>(T::value), sizeof(T))

template <typename Probe>
void kind(char const* name)
{
    InterfaceInfo const info = Probe().getInterfaceInfo();
    std::printf("interface %s '%s' %d.%d\n", name, info.kind, info.major, info.minor);
}

int main()
{
    SIZE(Dims64);
    OFFSET(Dims64, nbDims);
    OFFSET(Dims64, d);
    SIZE(Dims);
    SIZE(PluginTensorDesc);
    OFFSET(PluginTensorDesc, dims);
    OFFSET(PluginTensorDesc, type);
    OFFSET(PluginTensorDesc, format);
    OFFSET(PluginTensorDesc, scale);
    SIZE(DynamicPluginTensorDesc);
    OFFSET(DynamicPluginTensorDesc, desc);
    OFFSET(DynamicPluginTensorDesc, min);
    OFFSET(DynamicPluginTensorDesc, max);
    OFFSET(DynamicPluginTensorDesc, opt);
    SIZE(DimsExprs);
    OFFSET(DimsExprs, nbDims);
    OFFSET(DimsExprs, d);
    SIZE(PluginField);
    OFFSET(PluginField, name);
    OFFSET(PluginField, data);
    OFFSET(PluginField, type);
    OFFSET(PluginField, length);
    SIZE(PluginFieldCollection);
    OFFSET(PluginFieldCollection, nbFields);
    OFFSET(PluginFieldCollection, fields);
    SIZE(InterfaceInfo);
    OFFSET(InterfaceInfo, kind);
    OFFSET(InterfaceInfo, major);
    OFFSET(InterfaceInfo, minor);
    SIZE(IDimensionExpr);
    std::printf("offsetof IDimensionExpr.mImpl %zu\n", ProbeExpression::implementation());
    SIZE(IExprBuilder);
    std::printf("offsetof IExprBuilder.mImpl %zu\n", ProbeExpressions::implementation());
    SIZE(IVersionedInterface);
    SIZE(IPluginV3);
    SIZE(IPluginCapability);
    SIZE(IPluginV3OneCore);
    SIZE(IPluginV3OneBuild);
    SIZE(IPluginV3OneRuntime);
    SIZE(IPluginCreatorInterface);
    SIZE(IPluginCreatorV3One);

    ENUM(APILanguage, kCPP);
    ENUM(APILanguage, kPYTHON);
    ENUM(DataType, kFLOAT);
    ENUM(DataType, kHALF);
    ENUM(DataType, kINT8);
    ENUM(DataType, kINT32);
    ENUM(DataType, kBOOL);
    ENUM(DataType, kUINT8);
    ENUM(DataType, kFP8);
    ENUM(DataType, kBF16);
    ENUM(DataType, kINT64);
    ENUM(DataType, kINT4);
    ENUM(TensorFormat, kLINEAR);
    ENUM(DimensionOperation, kPROD);
    ENUM(DimensionOperation, kFLOOR_DIV);
    ENUM(PluginFieldType, kFLOAT16);
    ENUM(PluginFieldType, kFLOAT32);
    ENUM(PluginFieldType, kFLOAT64);
    ENUM(PluginFieldType, kINT8);
    ENUM(PluginFieldType, kINT16);
    ENUM(PluginFieldType, kINT32);
    ENUM(PluginFieldType, kCHAR);
    ENUM(PluginFieldType, kDIMS);
    ENUM(PluginFieldType, kUNKNOWN);
    ENUM(PluginFieldType, kBF16);
    ENUM(PluginFieldType, kINT64);
    ENUM(TensorRTPhase, kBUILD);
    ENUM(TensorRTPhase, kRUNTIME);
    ENUM(PluginCapabilityType, kCORE);
    ENUM(PluginCapabilityType, kBUILD);
    ENUM(PluginCapabilityType, kRUNTIME);
    std::printf("IPluginV3OneBuild::kDEFAULT_FORMAT_COMBINATION_LIMIT %d\n", IPluginV3OneBuild::kDEFAULT_FORMAT_COMBINATION_LIMIT);
    std::printf("Dims::MAX_DIMS %d\n", Dims::MAX_DIMS);

    kind<ProbePlugin>("IPluginV3");
    kind<ProbeCore>("IPluginV3OneCore");
    kind<ProbeBuild>("IPluginV3OneBuild");
    kind<ProbeRuntime>("IPluginV3OneRuntime");
    kind<ProbeCreator>("IPluginCreatorV3One");
    ProbeDimension dimension;
    std::printf("dimension %d\n", dimension.isConstant());
}
