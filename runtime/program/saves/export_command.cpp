// `sluice export`: a model's files alone, in transformers' form.
#include <fmt/core.h>

#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/hugging_face.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/files/atomic_file.hpp"
#include "runtime/models/model_config.hpp"
#include "runtime/models/model_tensors.hpp"
#include "runtime/process/process.hpp"
#include "runtime/program/options/option_table.hpp"
#include "runtime/program/saves/save_commands.hpp"
#include "runtime/weights/file_layout.hpp"
#include "runtime/weights/weights.hpp"

namespace sluice {
namespace {

namespace fs = std::filesystem;

constexpr const char* kAboutExport =
    R"(Writes a model as a directory of Hugging Face: config.json, model.safetensors or its parts
with their index, tokenizer files, SHA256SUMS of them all. DIR is what 'sluice train --save DIR'
wrote, of which it takes the newest step, one step, or a directory of Hugging Face. OUT is new or
empty. Needs no MPI.)";

constexpr std::size_t kLargestPart = std::size_t{5} << 30;

struct ExportOptions {
  std::string directory, out, precision = "saved";
  Verify verify = Verify::kFull;
};

// Reads a parameter once for all its parts, which follow each other.
class Values {
 public:
  explicit Values(SavedTensors& tensors) : tensors_(tensors) {}
  std::span<const float> of(const std::string& name) {
    if (name != name_) {
      values_.resize(static_cast<std::size_t>(tensors_.find(name)->shape.elements()));
      tensors_.read(name, values_);
      name_ = name;
    }
    return values_;
  }

 private:
  SavedTensors& tensors_;
  std::string name_;
  std::vector<float> values_;
};

std::vector<FileTensor> file_tensors(const TransformerConfig& model, DType dtype, Values& values) {
  const FileLayout layout = hugging_face_layout(model);
  std::vector<FileTensor> tensors;
  for (const ParameterInfo& parameter : parameter_list(model)) {
    std::size_t first = 0;
    for (const FilePart& part : layout.at(parameter.name)) {
      const TensorSpec spec = {dtype, part_shape(part, parameter.shape)};
      const auto elements = static_cast<std::size_t>(spec.shape.elements());
      tensors.push_back({part.name, spec,
                         [&values, name = parameter.name, part, first, elements,
                          dtype](std::vector<std::byte>& scratch) {
                           return write_part(part, values.of(name).subspan(first, elements), dtype,
                                             scratch);
                         }});
      first += elements;
    }
  }
  return tensors;
}

// The directory and the files of an export. Removes them where not all of them could be written, so
// that the same command can be tried again.
class Output {
 public:
  explicit Output(fs::path directory) : directory_(std::move(directory)) {
    std::error_code error;
    made_ = fs::create_directories(directory_, error);
    if (error || !fs::is_empty(directory_, error)) {
      throw_error(ErrorCode::kIo, "directory '{}' {}; give a new or an empty directory",
                  directory_.string(),
                  error ? "cannot be written: " + error.message() : "is not empty");
    }
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;
  ~Output() {
    if (complete_) return;
    std::error_code ignored;
    for (const fs::path& file : files_) fs::remove(file, ignored);
    if (made_) fs::remove(directory_, ignored);
  }

  // A file that is written next.
  fs::path file(const std::string& name) { return files_.emplace_back(directory_ / name); }
  void text(const std::string& name, const std::string& text) {
    AtomicFile written(file(name));
    written.write(text);
    written.commit();
  }
  void complete() { complete_ = true; }
  [[nodiscard]] const fs::path& directory() const { return directory_; }
  [[nodiscard]] const std::vector<fs::path>& files() const { return files_; }

 private:
  fs::path directory_;
  std::vector<fs::path> files_;
  bool made_ = false, complete_ = false;
};

// `others`: bytes of the files beside them.
void write_parts(Output& out, std::vector<FileTensor> tensors, std::size_t others) {
  std::vector<std::vector<FileTensor>> parts(1);
  std::size_t bytes = 0, all = 0;
  for (FileTensor& tensor : tensors) {
    if (bytes > 0 && bytes + tensor.spec.bytes() > kLargestPart) {
      parts.emplace_back();
      bytes = 0;
    }
    bytes += tensor.spec.bytes();
    all += tensor.spec.bytes();
    parts.back().push_back(std::move(tensor));
  }
  require_space(out.directory(), all + others);
  const auto count = static_cast<int>(parts.size());
  std::map<std::string, std::string> file_of;
  for (int i = 0; i < count; ++i) {
    const std::vector<FileTensor>& part = parts[static_cast<std::size_t>(i)];
    const std::string name = weights_file_name("model", i, count);
    write_safetensors(out.file(name), part, {{"format", "pt"}});
    for (const FileTensor& tensor : part) file_of[tensor.name] = name;
  }
  if (count > 1) {
    (void)out.file(weights_index_name("model"));
    (void)write_weights_index(out.directory(), "model", file_of, all);
  }
}

void write_export(const ExportOptions& options) {
  const fs::path from = newest_save(options.directory);
  const TransformerConfig model = read_model_config(from);
  if (architecture_of(model).empty()) {
    throw_usage("the model in '{}' has no architecture of transformers; its files stay as they are",
                from.string());
  }
  SavedTensors tensors = open_model_tensors(from, options.verify);
  const bool saved = options.precision == "saved";
  const bool bf16 = saved ? tensors.find("token_embedding.weight")->dtype == DType::kBf16
                          : options.precision == "bf16";
  if (!saved) tensors.prefer_masters();
  const DType dtype = bf16 ? DType::kBf16 : DType::kF32;
  Output out(options.out);
  std::map<std::string, std::string> files =
      hugging_face_files(model, dtype, read_model_files(from));
  std::size_t others = 0;
  for (const auto& [name, text] : files) others += text.size();
  Values values(tensors);
  write_parts(out, file_tensors(model, dtype, values), others);
  // config.json last: without it the directory is no model.
  const std::string config = std::exchange(files["config.json"], "");
  files.erase("config.json");
  for (const auto& [name, text] : files) out.text(name, text);
  out.text(kSumsName,
           sums_of(out.files()) + sum_line(std::as_bytes(std::span(config)), "config.json"));
  out.text("config.json", config);
  out.complete();
  fmt::print("'{}': {} of '{}', {} parameters in {}\n", out.directory().string(),
             architecture_of(model), from.string(), parameter_count(model), bf16 ? "bf16" : "fp32");
}

}  // namespace

int export_command(const std::vector<std::string>& arguments) {
  ExportOptions options;
  OptionTable table("sluice export DIR OUT [options]", kAboutExport);
  table.add_argument("DIR", options.directory);
  table.add_argument("OUT", options.out);
  table.add_choice("precision", options.precision, {"saved", "fp32", "bf16"},
                   "of the tensors; saved: that of DIR's files");
  table.add_choice("verify", options.verify, {{"full", Verify::kFull}, {"off", Verify::kOff}},
                   "what is compared with the hashes of a save: all its files, or nothing");
  return run_guarded(table, arguments, [&] { write_export(options); });
}

}  // namespace sluice
