#include "runtime/checkpoint/program_state.hpp"

#include <optional>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {

void SavedStates::add(const std::string& name, ProgramState state) {
  if (!is_state_json(state.json)) {
    throw_usage("state '{}': its text is no JSON of at most 100 levels and 4,000 keys an object",
                name);
  }
  json_[name] = std::move(state.json);
  for (auto& [tensor, values] : state.tensors) {
    if (values.bytes.size() != values.spec.bytes()) {
      throw_usage("state '{}': tensor '{}' has {} bytes, but {} takes {}", name, tensor,
                  values.bytes.size(), to_string(values.spec), values.spec.bytes());
    }
    values_.push_back(std::move(values));
    tensors_.push_back({name + "/" + tensor, values_.back().tensor()});
  }
}

std::map<std::string, ProgramState> read_states(Collectives& world,
                                                const std::filesystem::path& directory,
                                                const SaveState& state) {
  std::map<std::string, ProgramState> states;
  for (const auto& [name, json] : state.user) states[name].json = json;
  const bool first = world.communicator().rank() == 0;
  std::optional<SafetensorsFile> file;
  for (const SavedTensor& tensor : state.tensors) {
    if (tensor.file != "user.safetensors") continue;
    const std::size_t slash = tensor.name.find('/');
    const auto found = states.find(tensor.name.substr(0, slash));
    if (slash == std::string::npos || found == states.end()) {
      throw_error(ErrorCode::kWeights, "'{}': tensor '{}' is of no state that state.json names",
                  (directory / tensor.file).string(), tensor.name);
    }
    HostTensor& values = found->second.tensors[tensor.name.substr(slash + 1)];
    values.spec = tensor.spec;
    values.bytes.resize(tensor.spec.bytes());
    if (first) {
      if (!file) file.emplace(directory / tensor.file);
      for (const SafetensorsFile::Entry& entry : file->entries()) {
        if (entry.name == tensor.name && entry.bytes.size() == values.bytes.size()) {
          std::copy(entry.bytes.begin(), entry.bytes.end(), values.bytes.begin());
        }
      }
    }
    world.broadcast(values.bytes, 0);
  }
  return states;
}

}  // namespace sluice
