#include "kernels/arm_features.h"

#include <stddef.h>

#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#elif defined(_WIN32)
#include <windows.h>
#endif

namespace edgedec {

#if defined(__APPLE__)
static bool has_feature(const char *name) {
  int found = 0;
  size_t n_bytes = sizeof found;
  return sysctlbyname(name, &found, &n_bytes, nullptr, 0) == 0 && found != 0;
}
bool has_dots() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return has_feature("hw.optional.arm.FEAT_I8MM"); }
#elif defined(__linux__)
bool has_dots() { return (getauxval(AT_HWCAP) & (1ul << 20)) != 0; }   // HWCAP_ASIMDDP
bool has_i8mm() { return (getauxval(AT_HWCAP2) & (1ul << 13)) != 0; }  // HWCAP2_I8MM
#elif defined(_WIN32)
bool has_dots() { return IsProcessorFeaturePresent(43) != 0; }  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
bool has_i8mm() { return IsProcessorFeaturePresent(66) != 0; }  // PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE
#else
bool has_dots() { return false; }  // not known
bool has_i8mm() { return false; }
#endif

}  // namespace edgedec
