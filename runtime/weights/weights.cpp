#include "runtime/weights/weights.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/files/atomic_file.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/files/mapped_file.hpp"

namespace sluice {
namespace fs = std::filesystem;
namespace {

[[noreturn]] void refuse(const fs::path& path, const std::string& what) {
  throw_error(ErrorCode::kWeights, "weights '{}': {}", path.string(), what);
}

// Tensor name -> file name. An index comes from anywhere, so a file name may not leave the
// directory.
std::map<std::string, std::string> read_index(const fs::path& path) {
  const MappedFile file(path, ErrorCode::kWeights);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                              file.bytes().size());
  const nlohmann::json index = parse_json(text, NoJson::kDiscard);
  if (index.is_discarded()) refuse(path, "is no JSON");
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object()) {
    refuse(path, "has no object 'weight_map'");
  }
  std::map<std::string, std::string> file_of;
  for (const auto& [name, value] : map->items()) {
    if (!value.is_string()) refuse(path, fmt::format("the file of tensor '{}' is no string", name));
    const auto& part = value.get_ref<const std::string&>();
    if (part.empty() || part == "." || part == ".." || part.find('/') != std::string::npos ||
        part.find('\0') != std::string::npos) {
      refuse(path,
             fmt::format("tensor '{}' is in '{}', which is no name of a file next to the index",
                         name, part));
    }
    file_of.emplace(name, part);
  }
  return file_of;
}

// Files that have the name of a part, and that the index does not name.
void require_no_other_parts(const fs::path& directory, const std::string& kind,
                            const std::set<std::string>& parts) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kind + "-") || !name.ends_with(".safetensors") || parts.contains(name)) {
      continue;
    }
    refuse(directory / name, fmt::format("{} does not name it; remove it, or give the index that "
                                         "belongs to it",
                                         weights_index_name(kind)));
  }
}

void require_kind_name(const std::string& kind) {
  if (kind.empty() || kind.find('/') != std::string::npos) {
    throw_error(ErrorCode::kInternal, "'{}' is no kind of weights", kind);
  }
}

}  // namespace

bool has_weights(const fs::path& directory, const std::string& kind) {
  std::error_code error;
  return fs::exists(directory / weights_file_name(kind, 0, 1), error) ||
         fs::exists(directory / weights_index_name(kind), error);
}

std::string weights_file_name(const std::string& kind, int index, int count) {
  if (count == 1) return kind + ".safetensors";
  return fmt::format("{}-{:05}-of-{:05}.safetensors", kind, index + 1, count);
}

std::string weights_index_name(const std::string& kind) { return kind + ".safetensors.index.json"; }

std::string write_weights_index(const fs::path& directory, const std::string& kind,
                                const std::map<std::string, std::string>& file_of,
                                std::size_t total_bytes) {
  nlohmann::ordered_json index;
  index["metadata"]["total_size"] = total_bytes;
  index["weight_map"] = file_of;
  const fs::path path = directory / weights_index_name(kind);
  std::string text;
  try {
    text = dump_json(index, 2) + "\n";
  } catch (const nlohmann::json::exception&) {
    throw_error(ErrorCode::kIo, "cannot write '{}': a tensor's name is not valid UTF-8",
                path.string());
  }
  write_file(path, text);
  return text;
}

WeightsDirectory::WeightsDirectory(const fs::path& directory, const std::string& kind)
    : directory_(directory) {
  require_kind_name(kind);
  const fs::path single = directory / weights_file_name(kind, 0, 1);
  const fs::path index = directory / weights_index_name(kind);
  std::error_code error;
  const bool has_single = fs::exists(single, error);
  const bool has_index = fs::exists(index, error);
  if (has_single && has_index) {
    refuse(directory, fmt::format("holds {} and {}; one of them is from another save, remove it",
                                  single.filename().string(), index.filename().string()));
  }
  if (!has_single && !has_index) {
    refuse(directory, fmt::format("neither {} nor {} is there", single.filename().string(),
                                  index.filename().string()));
  }
  std::map<std::string, std::string> file_of;
  std::set<std::string> parts = {single.filename().string()};
  if (has_index) {
    file_of = read_index(index);
    parts.clear();
    for (const auto& [name, part] : file_of) parts.insert(part);
  }
  for (const std::string& part : parts) {
    const SafetensorsFile& file = files_.emplace_back(directory / part);
    file_names_.push_back(part);
    for (const SafetensorsFile::Entry& entry : file.entries()) {
      const auto listed = file_of.find(entry.name);
      if (has_index && (listed == file_of.end() || listed->second != part)) {
        refuse(directory / part, fmt::format("holds tensor '{}', which the index {}", entry.name,
                                             listed == file_of.end()
                                                 ? "lacks"
                                                 : fmt::format("places in '{}'", listed->second)));
      }
      by_name_.emplace(entry.name, Place{files_.size() - 1, &entry});
    }
  }
  require_one_save();
  if (has_index) require_no_other_parts(directory, kind, parts);
  for (const auto& [name, part] : file_of) {
    if (!by_name_.contains(name)) {
      refuse(index, fmt::format("places tensor '{}' in '{}', which lacks it", name, part));
    }
  }
}

void WeightsDirectory::require_one_save() const {
  for (const SafetensorsFile& file : files_) {
    const auto first = files_.front().metadata().find("step");
    const auto step = file.metadata().find("step");
    const bool none = first == files_.front().metadata().end();
    if (none != (step == file.metadata().end()) || (!none && step->second != first->second)) {
      refuse(directory_, "its parts are of different steps: a save was cut short");
    }
  }
}

const SafetensorsFile::Entry* WeightsDirectory::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second.entry;
}

std::string WeightsDirectory::file_of(const std::string& name) const {
  return file_names_[by_name_.at(name).file];
}

std::vector<std::string> WeightsDirectory::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : by_name_) names.push_back(name);
  return names;
}

}  // namespace sluice
