// What autograd asks of a CPU build of torch before it differentiates fake tensors on "cuda": a
// device guard that does nothing, and hooks that say one device is there. No kernel is faked.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdlib>

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device only() { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return only(); }
  Device getDevice() const override { return only(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, only()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, only()); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct CUDAHooks final : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
using at::CUDAHooksRegistry, at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);  // torch looks for this very name

// scaled_dot_product_attention asks this stub; CUDA's own answer is in libtorch_cuda. The rule is that
// of torch's documentation: flash attention for half precision from Ampere on, the memory-efficient
// kernel where it takes the dtype, else attention written out ($LOCKSTEP_AMPERE: 1 or 0).
static int64_t choice(const at::Tensor& q, const at::Tensor&, const at::Tensor&,
                      const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  const char* given = std::getenv("LOCKSTEP_AMPERE");
  const bool ampere = given && std::atoi(given);
  const bool bfloat16 = q.scalar_type() == at::kBFloat16, half = q.scalar_type() == at::kHalf;
  const int64_t width = q.size(-1);
  if (ampere && (bfloat16 || half) && width <= 256) return 1;
  const bool taken = half || q.scalar_type() == at::kFloat || (bfloat16 && ampere);
  return taken && width % (half || bfloat16 ? 8 : 4) == 0 ? 2 : 0;
}
static at::native::RegisterCUDADispatch<decltype(at::native::_fused_sdp_choice_stub)> registered(
    at::native::_fused_sdp_choice_stub, &choice);
