#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "decoding.h"
#include "machine.h"

namespace py = pybind11;
using namespace py::literals;

namespace ptx {
namespace {

const char* const kSpecialNames[] = {"%tid.x",    "%tid.y",    "%tid.z",   "%ntid.x",  "%ntid.y",
                                     "%ntid.z",   "%ctaid.x",  "%ctaid.y", "%ctaid.z", "%nctaid.x",
                                     "%nctaid.y", "%nctaid.z", "%laneid",  "%warpid"};

const char* const kClassNames[] = {"integer", "float",     "double", "special", "convert",
                                   "move",    "predicate", "global", "shared",  "parameter",
                                   "copy",    "shuffle",   "matrix", "barrier", "branch"};

void add_instruction(Program& program, const std::string& name,
                     const std::vector<std::pair<std::vector<uint32_t>, int64_t>>& operands,
                     std::optional<std::pair<uint32_t, bool>> guard, int target, int reconvergence) {
  Instruction instruction;
  for (const auto& [slots, offset] : operands) instruction.operands.push_back({slots, offset});
  if (guard) {
    instruction.guarded = true;
    std::tie(instruction.guard, instruction.guard_negated) = *guard;
  }
  instruction.target = target;
  instruction.reconvergence = reconvergence;
  decode(name, instruction, program);
  program.instructions.push_back(std::move(instruction));
}

py::array_t<int64_t> table(const std::vector<Count>& counts) {
  py::array_t<int64_t> result({counts.size(), size_t{6}});
  auto view = result.mutable_unchecked<2>();
  for (size_t i = 0; i < counts.size(); ++i) {
    const Count& c = counts[i];
    const int64_t row[] = {c.executed, c.lanes, c.bytes, c.sectors, c.wavefronts, c.multiply_adds};
    for (size_t j = 0; j < 6; ++j) view(i, j) = row[j];
  }
  return result;
}

// Returns (counts [instructions, 6], failure); failure is None, or where and why the launch failed.
py::tuple run_launch(const Program& program, GlobalMemory& memory, std::array<uint32_t, 3> grid,
                     std::array<uint32_t, 3> block, const py::bytes& parameters, uint32_t shared_bytes,
                     const std::vector<int64_t>& blocks, uint64_t seed, uint64_t most_instructions, bool strict_wgmma) {
  const std::string bytes = parameters;
  Launch launch{program,
                memory,
                {grid[0], grid[1], grid[2]},
                {block[0], block[1], block[2]},
                {bytes.begin(), bytes.end()},
                shared_bytes,
                most_instructions,
                strict_wgmma,
                std::vector<Count>(program.instructions.size())};
  Located failure;
  bool passed;
  {
    py::gil_scoped_release release;
    passed = run(launch, blocks, seed, failure);
  }
  py::object where = py::none();
  if (!passed) {
    where = py::dict("kind"_a = failure.kind, "what"_a = failure.what, "instruction"_a = failure.instruction,
                     "block"_a = failure.block, "warp"_a = failure.warp, "lane"_a = failure.lane,
                     "address"_a = failure.address);
  }
  return py::make_tuple(table(launch.counts), where);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Program>(module, "Program")
      .def(py::init([](std::string name, uint32_t slots, const std::map<uint32_t, uint64_t>& constants,
                       const std::map<uint32_t, std::string>& specials) {
        Program program{std::move(name), {}, slots, {}, {}};
        for (const auto& [slot, value] : constants) program.constants.push_back({slot, value});
        for (const auto& [slot, special] : specials) {
          const auto found = std::find(std::begin(kSpecialNames), std::end(kSpecialNames), special);
          if (found == std::end(kSpecialNames))
            throw std::invalid_argument("the special register " + special + " is not known");
          program.specials.push_back({slot, static_cast<Special>(found - std::begin(kSpecialNames))});
        }
        return program;
      }))
      .def("add", &add_instruction)
      .def("classes", [](const Program& program) {
        std::vector<std::string> names;
        for (const Instruction& instruction : program.instructions)
          names.emplace_back(kClassNames[static_cast<int>(instruction.kind)]);
        return names;
      });
  py::class_<GlobalMemory>(module, "GlobalMemory")
      .def(py::init<>())
      .def("mark_unwritten", &GlobalMemory::mark_unwritten)
      .def("mark_written", &GlobalMemory::mark_written)
      .def("begin_launch",
           [](GlobalMemory& memory, const std::vector<std::tuple<uint64_t, uint64_t, std::string>>& regions) {
             std::vector<GlobalMemory::Region> passed;
             for (const auto& [begin, end, name] : regions) passed.push_back({begin, end, name});
             memory.begin_launch(std::move(passed));
           });
  module.def("run", &run_launch);
  module.def("known_instructions", &known_instructions);
  module.attr("SHARED_BASE") = SharedMemory::kBase;
}

}  // namespace
}  // namespace ptx
