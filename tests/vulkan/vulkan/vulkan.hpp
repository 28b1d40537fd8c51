// For building llama.cpp against Vulkan headers before 1.3.275 (Debian 12 has 1.3.239), as `make test-vulkan` does: what they
// lack and ggml's Vulkan backend names. It says nothing to the driver unless a validation layer is installed.
#pragma once
#include_next <vulkan/vulkan.hpp>

#if VK_HEADER_VERSION < 275 && !defined(VK_EXT_layer_settings)
#include <vector>

namespace vk {

enum class LayerSettingTypeEXT { eBool32 = 0 };

struct LayerSettingEXT {
    const char * pLayerName;
    const char * pSettingName;
    LayerSettingTypeEXT type;
    uint32_t valueCount;
    const void * pValues;
};

struct LayerSettingsCreateInfoEXT {
    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings)
        : settingCount(static_cast<uint32_t>(settings.size())), pSettings(settings.data()) {}

    int sType = 1000496000; // VK_STRUCTURE_TYPE_LAYER_SETTINGS_CREATE_INFO_EXT
    const void * pNext = nullptr;
    uint32_t settingCount;
    const LayerSettingEXT * pSettings;
};

} // namespace vk
#endif
