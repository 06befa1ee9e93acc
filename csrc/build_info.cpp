// What this build contains, as attributes of a Python module: `rbm info` prints them. The build defines the RBM_ macros.
#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

// The build writes an empty text for what it does not contain.
py::object text_or_none(const char* text) { return *text == '\0' ? py::object(py::none()) : py::str(text); }

}  // namespace

PYBIND11_MODULE(_build_info, m) {
  m.doc() = "What this build of rbm_kernels contains.";
  m.attr("version") = RBM_VERSION;
  m.attr("build_type") = RBM_BUILD_TYPE;
  m.attr("cxx_compiler") = RBM_CXX_COMPILER;
  m.attr("cxx_flags") = RBM_CXX_FLAGS;
  m.attr("cuda_version") = text_or_none(RBM_CUDA_VERSION);
  m.attr("cuda_architectures") = text_or_none(RBM_CUDA_ARCHITECTURES);
  m.attr("abi_target") = RBM_ABI_TARGET;
  m.attr("torch_version") = RBM_TORCH_VERSION;
}
